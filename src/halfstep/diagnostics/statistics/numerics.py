"""The statistics of whole steps: one line of ``numerics.jsonl`` each, as values and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from halfstep.diagnostics.metrics import NUMERICS
from halfstep.diagnostics.statistics.values import Kind, TensorStatistics
from halfstep.diagnostics.statistics.what_if import (
    FLUSHED_AT_MOST,
    Window,
    as_format,
    beyond,
    common_window,
    what_if,
    window,
)
from halfstep.errors import DataError
from halfstep.formats import FloatFormat
from halfstep.shown import aligned

SCALED: tuple[Kind, ...] = ("activation_gradient", "gradient")
"""What a loss scale multiplies."""
_SPELLED = {"activation_gradient": "gradient of output", "gradient": "gradient of weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumerics:
    """What is known of the numbers of one watched step; ``print`` shows it as a table."""

    step: int
    """Number of the step, from 1; skipped steps count."""
    applied: bool
    """Whether the weights were updated."""
    loss_scale: float
    """The loss scale of its backward; NaN where that was not finite."""
    policy: str
    """The precision policy, or empty in a loop without one."""
    tensors: tuple[TensorStatistics, ...]
    """In the order in which their first numbers were counted."""

    def of(self, *kinds: Kind) -> tuple[TensorStatistics, ...]:
        """The tensors of some kinds."""
        return tuple(one for one in self.tensors if one.kind in kinds)

    def window(self, form: FloatFormat | str = "fp16") -> Window | None:
        """The loss scales that fit the gradients; None where there are none but zeros."""
        return common_window(self.in_16_bits(), form)

    def verdicts(self, form: FloatFormat | str = "fp16") -> tuple[str, ...]:
        """What a format would make of the numbers, in sentences."""
        form, said = as_format(form), []
        over = [one for one in self.of("activation", "weight") if beyond(one.absmax, form)]
        if over:
            most = max(over, key=lambda one: one.absmax)
            said.append(
                f"{form.name} would overflow in {len(over)} weights and outputs, most in "
                f"{_title(most)}, whose largest magnitude is {most.absmax:.3g} where {form.name} "
                f"ends at {form.max:g}"
            )
        fit = self.window(form)
        if fit is None:
            return tuple(said)
        gradients = self.in_16_bits()
        said.append(f"{form.name} gradients: {fit}")
        flushed = _shares(gradients, form)
        if flushed > FLUSHED_AT_MOST:
            said[-1] += f"; without a scale {flushed:.1%} of them would be flushed to 0"
        return tuple(said)

    def in_16_bits(self) -> tuple[TensorStatistics, ...]:
        """The gradients that a 16-bit format would hold.

        Of outputs, those that are in 16 bits now, or all where none is: a mixed policy leaves the
        others in fp32. Of weights, all: a 16-bit matmul makes them, whatever they are kept in.
        """
        outputs = self.of("activation_gradient")
        low = tuple(one for one in outputs if one.dtype in ("bfloat16", "float16"))
        return (*(low or outputs), *self.of("gradient"))

    def worst(
        self, form: FloatFormat | str = "fp16", k: int = 0, rows: int = 12
    ) -> list[TensorStatistics]:
        """The tensors that a format would treat worst, with gradients times 2^k."""

        def badness(one: TensorStatistics) -> tuple[float, float, float]:
            found = what_if(one, form, k if one.kind in SCALED else 0)
            return (one.nan + one.inf) / max(one.elements, 1), found.overflowed, found.flushed

        return sorted(self.tensors, key=badness, reverse=True)[:rows]

    def table(self, form: FloatFormat | str = "fp16", *, k: int = 0, rows: int | None = 12) -> str:
        """The tensors that a format would treat worst, and the verdicts.

        Args:
            form: The format of the what-if, or its name.
            k: Gradients are multiplied by the loss scale 2^k first.
            rows: How many tensors; None: all, in the order of the step.

        Returns:
            Text with one line for each tensor.
        """
        form = as_format(form)
        chosen = self.tensors if rows is None else self.worst(form, k, rows)
        scaled = f" at 2^{k}" if k else ""
        lines = [
            (
                *("tensor", "dtype", "elements", "largest", "rms", "zero", "subnormal"),
                *("not finite", f"{form.name}{scaled}: flushed", f"{form.name}{scaled}: overflow"),
                "scales that fit",
            ),
            *(_line(one, form, k) for one in chosen),
        ]
        head = (
            f"step {self.step}{'' if self.applied else ' (skipped)'}, loss scale "
            f"{self.loss_scale:g}{', ' + self.policy if self.policy else ''}: "
            f"{len(chosen)} of {len(self.tensors)} tensors"
        )
        table = aligned(lines, range(1, len(lines[0])))
        return "\n".join([head, table, *self.verdicts(form)])

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """One line of strict JSON."""
        table = {
            "step": self.step,
            "applied": self.applied,
            "loss_scale": self.loss_scale if math.isfinite(self.loss_scale) else None,
            "policy": self.policy,
            "tensors": [one.to_dict() for one in self.tensors],
        }
        return json.dumps(table, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read what :meth:`to_json` gave.

        Raises:
            DataError: If the line is cut or is something else.
        """
        try:
            table: Any = json.loads(line)
            if type(table["step"]) is not int:
                raise ValueError(table["step"])
            scale = table["loss_scale"]
            return cls(
                step=table["step"],
                applied=bool(table["applied"]),
                loss_scale=math.nan if scale is None else float(scale),
                policy=str(table["policy"]),
                tensors=tuple(map(TensorStatistics.from_dict, table["tensors"])),
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DataError(f"not the numerics of a step: {line[:80]!r}") from error


@dataclass(frozen=True, slots=True)
class Numerics:
    """A file of watched steps.

    Attributes:
        steps: Its steps, in order.
        damaged: Lines that could not be read, such as a last one that a killed process had begun.
    """

    steps: tuple[StepNumerics, ...]
    damaged: int


def load_numerics(path: str | Path) -> Numerics:
    """Read ``numerics.jsonl``; lines that are cut or damaged are counted and left out.

    Args:
        path: The file, or the folder of a run that was trained with ``--watch``.

    Returns:
        The steps that could be read, and how many could not.

    Raises:
        DataError: If there is no such file, or it cannot be read.
    """
    file = Path(path)
    file = file / NUMERICS if file.is_dir() else file
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(
            f"{file}: {error.strerror}; allowed: a file that halfstep.watch(to=...) wrote, or the "
            "folder of a run that was trained with --watch"
        ) from error
    steps, damaged = [], 0
    for line in lines:
        try:
            steps.append(StepNumerics.from_json(line))
        except DataError:
            damaged += 1
    return Numerics(tuple(steps), damaged)


def _title(one: TensorStatistics) -> str:
    return f"{_SPELLED.get(one.kind, one.kind)} {one.name}"


def _shares(several: Iterable[TensorStatistics], form: FloatFormat) -> float:
    """The share of all numbers that are not 0 that a format flushes without a loss scale."""
    pairs = [(what_if(one, form).flushed * one.nonzero, one.nonzero) for one in several]
    return sum(lost for lost, _ in pairs) / max(sum(of for _, of in pairs), 1)


def _line(one: TensorStatistics, form: FloatFormat, k: int) -> tuple[str, ...]:
    found = what_if(one, form, k if one.kind in SCALED else 0)
    fit = window(one, form) if one.kind in SCALED else None
    scales = ""
    if fit is not None:
        scales = f"2^{fit.low} to 2^{fit.high}" if fit.fits else "none"
    return (
        _title(one),
        one.dtype,
        f"{one.elements:,}",
        f"{one.absmax:.2g}",
        f"{one.rms:.2g}",
        *(f"{count / max(one.elements, 1):.1%}" for count in (one.zeros, one.subnormal)),
        f"{one.nan + one.inf:,}",
        f"{found.flushed:.1%}",
        f"{found.overflowed:.1%}",
        scales,
    )
