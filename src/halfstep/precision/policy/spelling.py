"""Parses a precision policy from a name, a string of fields or a file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

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
from halfstep.precision.policy.recipe import SCHEMES, parse_recipe
from halfstep.precision.scaling.loss_scale import LOSS_SCALE_FIELDS, Kind, LossScaleConfig

_NAMED = {**POLICIES, **RECIPES}
AUTO = "auto"
"""The name of the policy that the device decides."""
_OF_APEX = {"o0": "fp32", "o1": "fp16-mixed", "o2": "fp16-master", "o3": "fp16-pure"}
"""NVIDIA apex's levels, to the policies that do the same; they are suggested, and are no names."""


@dataclass(frozen=True, slots=True)
class Auto:
    """A policy whose device is not known yet: ``auto``, perhaps with fields or a file of its own.

    Attributes:
        text: What was written, such as ``"auto,moments=8bit"``.
    """

    text: str = AUTO

    def on(self, device: torch.device) -> PrecisionPolicy:
        """The policy on a device."""
        return parse_policy(self.text, device)

    def __str__(self) -> str:
        return self.text


def parse_policy(
    spec: str | PrecisionPolicy, device: str | torch.device | None = None
) -> PrecisionPolicy:
    """Parse a policy from its name, alias, field string or ``.toml`` file.

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
    rounding mode says; grad and reduce are as master; scale is dynamic if compute is fp16. A file
    holds the same keys, ``base`` for the name to start from, ``keep_fp32`` as a list of globs, and
    rules as a table ``[rules]`` of ``"glob" = "format"``; recipes may be tables of products there.

    Args:
        spec: A policy, its name, field string or ``.toml`` file.
        device: What ``auto`` is for; other policies do not depend on it.

    Raises:
        PrecisionError: For an unknown name, key or value, or fields that contradict each other.

    Example:
        >>> str(parse_policy("bf16"))
        'bf16-mixed'
        >>> str(parse_policy("params=fp16"))
        'fp16-master'
        >>> parse_policy("bf16-split,moments=8bit").moments
        '8bit'
        >>> parse_policy("fp16-mixd")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        halfstep.errors.PrecisionError: unknown precision policy 'fp16-mixd', did you mean \
'fp16-mixed'? Allowed: fp32, tf32, ...
    """

    def chosen() -> PrecisionPolicy:
        if device is None:
            raise PrecisionError(
                "precision auto depends on the device: parse_policy('auto', device), with the "
                "device that the model is on"
            )
        return POLICIES[choose(as_device(device)).policy]

    return _parse(spec, chosen)


def parse_later(spec: str | PrecisionPolicy | Auto) -> PrecisionPolicy | Auto:
    """Parse a policy, but leave ``auto`` for when the device is known.

    Raises:
        PrecisionError: As :func:`parse_policy`; also for fields that no choice of auto could take.
    """
    asked = False

    def bf16() -> PrecisionPolicy:
        nonlocal asked
        asked = True
        return POLICIES["bf16-mixed"]

    text = spec.text if isinstance(spec, Auto) else spec
    try:
        found = _parse(text, bf16)
    except PrecisionError:
        if not asked:
            raise
        found = _parse(text, lambda: POLICIES["fp16-mixed"])  # whose fields others may lack
    return Auto(str(text).strip()) if asked else found


def _parse(spec: str | PrecisionPolicy, auto: Callable[[], PrecisionPolicy]) -> PrecisionPolicy:
    """Parse a policy; ``auto`` returns the one to take for that name."""
    if isinstance(spec, PrecisionPolicy):
        return spec
    if not isinstance(spec, str):
        raise PrecisionError(_no_policy(spec))
    name = spec.strip()
    lower = name.lower()
    known = auto() if lower == AUTO else _NAMED.get(ALIASES.get(lower, lower))
    if known is not None:
        return known
    if name.endswith(".toml"):
        return _read_file(Path(name), auto)
    if "=" in name:
        first, _, rest = name.partition(",")
        base = None if "=" in first else _parse(first, auto)
        pairs = [part.partition("=") for part in (name if base is None else rest).split(",")]
        keys = [key.strip() for key, _, _ in pairs]
        if len(set(keys)) < len(keys):
            raise PrecisionError(f"{name!r} gives a key twice")
        return _from_fields({key.strip(): value.strip() for key, _, value in pairs}, base)
    hint, allowed = _hint(lower[:100]), ", ".join((*_NAMED, AUTO))
    raise PrecisionError(
        f"unknown precision policy {name[:40]!r}{hint} Allowed: {allowed}, with fields such as "
        "'bf16-split,moments=8bit', or a .toml file"
    )


def _hint(name: str) -> str:
    """A suggestion for a misspelt name; never one of another format than the name contains."""
    formats = {"tf32": "tf32", "bf": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32"}
    asked = next((short for word, short in formats.items() if word in name), "")
    names = {**{policy: policy for policy in _NAMED}, **ALIASES, AUTO: AUTO}
    known = [word for word, policy in names.items() if policy.startswith(asked)]
    if name in SCHEMES:
        return f", a recipe: bf16-mixed,recipe={name}."
    if name in _OF_APEX:
        return f", a level of NVIDIA apex: write {_OF_APEX[name]!r}."
    close = difflib.get_close_matches(name, known, n=1) or ([asked] if asked else [])
    return f", did you mean {close[0]!r}?" if close else "."


def _no_policy(spec: object) -> str:
    """The message for a policy that is not a string: what to write instead."""
    if spec in (torch.bfloat16, torch.float16):
        short = "bf16" if spec == torch.bfloat16 else "fp16"
        return (
            f"{spec} is a dtype, which does not say where it is used: write '{short}-mixed' "
            f"(weights stay fp32), '{short}-master' or '{short}-pure'"
        )
    return (
        f"the precision policy is a {type(spec).__name__}; allowed: a name such as 'bf16-mixed', "
        "or a PrecisionPolicy"
    )


def _read_file(path: Path, auto: Callable[[], PrecisionPolicy]) -> PrecisionPolicy:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PrecisionError(f"policy file {path}: cannot be read: {error}") from error
    base, rules, low = (table.pop(key, None) for key in ("base", "rules", "recipe"))
    kept = {key: table.pop(key, None) for key in _KEEP}
    if base is not None and (not isinstance(base, str) or base.strip().endswith(".toml")):
        raise PrecisionError(f"policy file {path}: base is {base!r}; allowed: the name of a policy")
    try:
        values = {
            key: value if isinstance(value, str) else repr(value) for key, value in table.items()
        }
        found = [rule for key, globs in kept.items() for rule in _keep(key, globs)]
        more = {} if low is None else {"recipe": parse_recipe(low)}
        start = None if base is None else _parse(base, auto)
        return _from_fields(values, start, [*found, *_rules(rules)], more)
    except PrecisionError as error:
        raise PrecisionError(f"policy file {path}: {error}") from error


def _keep(key: str, value: object) -> list[tuple[str, str]]:
    """The rules for globs given as a list or joined by ``|``."""
    globs = value.split("|") if isinstance(value, str) else [] if value is None else value
    if not isinstance(globs, list) or not all(isinstance(glob, str) for glob in globs):
        raise PrecisionError(f"{key} is {value!r}; allowed: a list of globs over module names")
    return [(glob.strip(), _KEEP[key]) for glob in globs]


def _rules(value: object) -> list[tuple[str, str]]:
    """The rules for a table of globs and formats, or for ``glob:format`` joined by ``|``."""
    if isinstance(value, str):
        parts = [part.rpartition(":") for part in value.split("|")]
        return [(glob.strip(), form.strip()) for glob, _, form in parts]
    table = {} if value is None else value
    if not isinstance(table, dict) or not all(isinstance(f, str | dict) for f in table.values()):
        raise PrecisionError(
            f'rules are {value!r}; allowed: a table with lines such as "*.norm" = "fp32", the '
            "glob in quotes"
        )
    return [(g, f if isinstance(f, str) else str(parse_recipe(f))) for g, f in table.items()]


def _from_fields(
    values: dict[str, str],
    base: PrecisionPolicy | None,
    rules: Sequence[tuple[str, str]] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> PrecisionPolicy:
    """Build a policy from fields as text and a base policy, with defaults for missing fields."""
    kept = [rule for key in _KEEP for rule in _keep(key, values.pop(key, None))]
    rules = [*rules, *kept, *_rules(values.pop("rules", None))]
    allowed = [*POLICY_FIELDS, *CHOICES, "scale", *LOSS_SCALE_FIELDS, *_KEEP, "rules", *_LOW]
    for key in values:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            hint = f", did you mean {close[0]!r}?" if close else "."
            known = ", ".join(allowed)
            raise PrecisionError(f"unknown policy key {key!r}{hint} Allowed: {known}")
    low = {**more, **{key: read(values[key]) for key, read in _LOW.items() if key in values}}
    tf32 = values.get("compute") == "tf32"
    ways: dict[str, Any] = {key: values[key] for key in CHOICES if key in values}
    dtypes: dict[str, Any] = {
        POLICY_FIELDS[key]: _read_dtype(key, value)
        for key, value in values.items()
        if key in POLICY_FIELDS and not (key == "compute" and tf32)
    }
    if base is None:
        params = dtypes.setdefault("param_dtype", torch.float32)
        compute = dtypes.setdefault("compute_dtype", torch.float32 if tf32 else params)
        mode = ROUNDING.get(ways.get("update", "nearest"))
        alone = mode is not None and mode.master_dtype == torch.bfloat16
        master = dtypes.setdefault("master_dtype", params if alone else torch.float32)
        added = torch.float32 if alone else master
        dtypes.setdefault("grad_dtype", added)
        dtypes.setdefault("reduce_dtype", added)
        scale = LossScaleConfig(kind="dynamic" if compute == torch.float16 else "none")
        base = PrecisionPolicy(**dtypes, **ways, tf32=tf32, loss_scale=scale)
    elif "compute" in values:
        dtypes.setdefault("compute_dtype", torch.float32)
        if dtypes["compute_dtype"] != base.compute_dtype:  # the base's scale is for another dtype
            kind: Kind = "dynamic" if dtypes["compute_dtype"] == torch.float16 else "none"
            base = replace(base, loss_scale=LossScaleConfig(kind=kind))
    else:
        tf32 = base.tf32
    options: dict[str, Any] = {}
    if "scale" in values:
        options["kind"] = values["scale"]
        if values["scale"] not in get_args(Kind):
            raise PrecisionError(f"scale={values['scale']}; allowed: {', '.join(get_args(Kind))}")
    for key in LOSS_SCALE_FIELDS:
        if key in values:
            options[key] = _read_number(key, values[key])
    if set(options) - {"kind"} and options.get("kind", base.loss_scale.kind) == "none":
        raise PrecisionError(
            f"{', '.join(sorted(set(options) - {'kind'}))} given, but this policy does not scale "
            "the loss; add scale=dynamic or scale=static"
        )
    return replace(
        base,
        **dtypes,
        **ways,
        tf32=tf32,
        **low,
        rules=(*base.rules, *rules),
        loss_scale=LossScaleConfig()
        if options.get("kind") == "none"
        else replace(base.loss_scale, **options),
    )


def _read_yes(text: str) -> bool:
    if text.lower() not in ("yes", "no", "true", "false"):
        raise PrecisionError(f"simulate={text}; allowed: yes, no")
    return text.lower() in ("yes", "true")


_KEEP = {"keep_fp32": "fp32", "keep_bf16": "bf16"}
"""The keys that list modules to keep in a format."""
_LOW: Mapping[str, Callable[[str], Any]] = {
    "recipe": parse_recipe,
    "simulate": _read_yes,
}
"""The keys about formats below 16 bits, and what reads their values."""


def _read_dtype(key: str, value: str) -> torch.dtype:
    if value not in DTYPES:
        allowed = [*DTYPES, "tf32"] if key == "compute" else [*DTYPES]
        raise PrecisionError(f"{key}={value}; allowed: {', '.join(allowed)}")
    return DTYPES[value]


def _read_number(key: str, text: str) -> float | int:
    try:
        value = float(text)
        integer = key in ("growth_interval", "hysteresis", "max_consecutive_skips")
        return int(text) if integer else value
    except ValueError:
        raise PrecisionError(f"{key}={text}; allowed: a number") from None
