"""Parses a precision policy from a name or a string of fields."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from halfstep.errors import PrecisionError
from halfstep.precision.border import as_device
from halfstep.precision.masters.rounding import ROUNDING
from halfstep.precision.policy.devices import choose
from halfstep.precision.policy.policy import (
    ALIASES,
    CHOICES,
    DTYPES,
    POLICIES,
    POLICY_FIELDS,
    RECIPES,
    PrecisionPolicy,
)
from halfstep.precision.policy.recipe import parse_recipe
from halfstep.precision.scaling.loss_scale import LOSS_SCALE_FIELDS, LossScaleConfig

_NAMED = {**POLICIES, **RECIPES}
AUTO = "auto"
"""The policy that the device decides; fields may follow it."""


def parse_policy(
    spec: str | PrecisionPolicy, device: str | torch.device | None = None
) -> PrecisionPolicy:
    """Parse a policy from its name, alias or field string.

    ``auto`` is the policy that suits ``device``: ``bf16-mixed`` where it multiplies bf16 natively,
    ``fp16-mixed`` where it has fp16 alone, else ``fp32`` (``halfstep doctor`` gives the reason).

    Grammar: ``key=value`` pairs joined by commas, after a name to start from if there is one. Keys:
    ``params compute output grad reduce master`` (fp32, bf16, fp16; compute also tf32), ``update``
    (a rounding mode, as split), ``moments`` (master, fp32, bf16, 8bit), ``scale`` (none, static,
    dynamic), the fields of :class:`~halfstep.LossScaleConfig`, ``keep_fp32`` (globs over module
    names, joined by ``|``) and ``rules`` (``glob:format``, joined by ``|``; after ``keep_fp32``'s).
    Below 16 bits: ``recipe`` (a scheme, or three as ``fprop/dgrad/wgrad``), ``simulate``
    (yes, no) and ``keep_bf16``, as ``keep_fp32``.
    Missing keys follow from the given ones: compute is as params; master is fp32, or what the
    rounding mode says; grad and reduce are as master; scale is dynamic if compute is fp16.

    Args:
        spec: A policy, its name or field string.
        device: What ``auto`` is for; other policies do not depend on it.

    Example:
        >>> str(parse_policy("bf16"))
        'bf16-mixed'
        >>> str(parse_policy("params=fp16"))
        'fp16-master'
        >>> parse_policy("bf16-split,moments=8bit").moments
        '8bit'
    """
    return spec if isinstance(spec, PrecisionPolicy) else _parse_text(spec, device)


def _parse_text(spec: str, device: str | torch.device | None) -> PrecisionPolicy:
    if not isinstance(spec, str):
        kind = f"dtype ({spec})" if isinstance(spec, torch.dtype) else type(spec).__name__
        raise PrecisionError(
            f"the precision policy is a {kind}; allowed: a name such as 'bf16-mixed', or a "
            "PrecisionPolicy"
        )
    name = spec.strip()
    if name.lower() == AUTO:
        if device is None:
            raise PrecisionError(
                "precision auto depends on the device: parse_policy('auto', device), with the "
                "device that the model is on"
            )
        return POLICIES[choose(as_device(device)).policy]
    known = _NAMED.get(ALIASES.get(name.lower(), name.lower()))
    if known is not None:
        return known
    if "=" not in name:
        raise _unknown(name)
    first, _, rest = name.partition(",")
    base = None if "=" in first else _parse_text(first, device)
    pairs = [part.partition("=") for part in (name if base is None else rest).split(",")]
    keys = [key.strip() for key, _, _ in pairs]
    if len(set(keys)) < len(keys):
        raise PrecisionError(f"{name!r} gives a key twice")
    return _from_fields({key.strip(): value.strip() for key, _, value in pairs}, base)


def parse_saved(spec: object) -> PrecisionPolicy | None:
    """The policy that a file names, in the spelling of whatever version; None if it names none."""
    try:
        return _parse_text(spec, None) if isinstance(spec, str) else None
    except PrecisionError:
        return None


def parse_later(spec: str | PrecisionPolicy) -> PrecisionPolicy | str:
    """Parse a policy, but leave ``auto`` and its fields as text until the device is known."""
    waits = isinstance(spec, str) and spec.strip().lower().partition(",")[0].strip() == AUTO
    return str(spec).strip() if waits else parse_policy(spec)


def _unknown(name: str) -> PrecisionError:
    """The error for a misspelt name; it suggests none of another format than the name contains."""
    names, lower = [*_NAMED, *ALIASES, AUTO], name.lower()[:100]
    alike = [known for known in names if known[:4] == lower[:4]]
    close = difflib.get_close_matches(lower, alike or names, n=1)
    hint = f", did you mean {close[0]!r}?" if close else "."
    return PrecisionError(
        f"unknown precision policy {name[:40]!r}{hint} Allowed: {', '.join((*_NAMED, AUTO))}, with "
        "fields such as 'bf16-split,moments=8bit'"
    )


def _from_fields(values: dict[str, str], base: PrecisionPolicy | None) -> PrecisionPolicy:
    """Build a policy from fields as text and a base policy, with defaults for missing fields."""
    for key in values:
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f", did you mean {close[0]!r}?" if close else "."
            raise PrecisionError(f"unknown policy key {key!r}{hint} Allowed: {', '.join(_KEYS)}")
    given: dict[str, Any] = {
        POLICY_FIELDS[key]: _read_dtype(key, value)
        for key, value in values.items()
        if key in POLICY_FIELDS
    }
    given |= {key: read(values[key]) for key, read in _READERS.items() if key in values}
    if "compute" in values:
        given["tf32"] = values["compute"] == "tf32"
    if base is None:
        base, given = PrecisionPolicy(), _completed(given)
    compute, scale = given.get("compute_dtype", base.compute_dtype), base.loss_scale
    if compute != base.compute_dtype:  # the base's scale is for another dtype
        scale = LossScaleConfig(kind="dynamic" if compute == torch.float16 else "none")
    rules = [
        (glob.strip(), form)
        for key, form in _KEEP.items()
        if key in values
        for glob in values[key].split("|")
    ]
    if values.get("rules"):
        parts = [part.rpartition(":") for part in values["rules"].split("|")]
        rules += [(glob.strip(), form.strip()) for glob, _, form in parts]
    return replace(
        base, **given, rules=(*base.rules, *rules), loss_scale=_read_scale(values, scale)
    )


def _completed(given: dict[str, Any]) -> dict[str, Any]:
    """The given fields, and what follows from them where nothing was given."""
    params = given.get("param_dtype", torch.float32)
    mode = ROUNDING.get(given.get("update", "nearest"))
    alone = mode is not None and mode.master_dtype == torch.bfloat16
    master = given.get("master_dtype", params if alone else torch.float32)
    added = torch.float32 if alone else master
    return {
        "compute_dtype": params,
        "master_dtype": master,
        "grad_dtype": added,
        "reduce_dtype": added,
        **given,
    }


def _read_scale(values: dict[str, str], scale: LossScaleConfig) -> LossScaleConfig:
    options: dict[str, Any] = {
        key: _read_number(key, values[key]) for key in LOSS_SCALE_FIELDS if key in values
    }
    if "scale" in values:
        options["kind"] = values["scale"]
    start = LossScaleConfig() if options.get("kind") == "none" else scale
    return replace(start, **options)


def _read_dtype(key: str, value: str) -> torch.dtype:
    if key == "compute" and value == "tf32":
        return torch.float32
    if value not in DTYPES:
        allowed = [*DTYPES, "tf32"] if key == "compute" else [*DTYPES]
        raise PrecisionError(f"{key}={value}; allowed: {', '.join(allowed)}")
    return DTYPES[value]


def _read_number(key: str, text: str) -> float | int:
    kind = type(getattr(LossScaleConfig(), key))
    try:
        return kind(text)  # type: ignore[no-any-return]
    except ValueError:
        raise PrecisionError(f"{key}={text}; allowed: a number") from None


def _read_yes(text: str) -> bool:
    if text.lower() not in ("yes", "no", "true", "false"):
        raise PrecisionError(f"simulate={text}; allowed: yes, no")
    return text.lower() in ("yes", "true")


_KEEP = {"keep_fp32": "fp32", "keep_bf16": "bf16"}
"""The keys that list modules to keep in a format."""
_READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(CHOICES, str),
    "recipe": parse_recipe,
    "simulate": _read_yes,
}
"""The keys whose value is one field, and what reads it."""
_KEYS = (*POLICY_FIELDS, "scale", *LOSS_SCALE_FIELDS, *_KEEP, "rules", *_READERS)
