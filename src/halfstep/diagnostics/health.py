"""The health of each layer over time: what it is now against its own past.

A run that diverges mostly begins in one layer, long before the loss shows it. Five numbers of each
are compared with the median of what they were. One is *out* if it is far above its median, in terms
of its own spread too, and if the rise is its own: not that of all layers (a schedule), of the
layers before it (the data) or of its neighbours. What is out is measured again on the next steps,
and reported if it stays, or at once if the jump is extreme. ``docs/health.md`` has the details.

**Source:** median and MAD as robust centre and spread: Rousseeuw and Croux, "Alternatives to the
median absolute deviation", 1993. The limits are halfstep's, chosen on 18 healthy programs.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.optim import Optimizer

from halfstep.diagnostics.lost_updates import sampled
from halfstep.diagnostics.metrics import append_line
from halfstep.diagnostics.module_calls import Call, ModuleCalls
from halfstep.diagnostics.statistics.steps import Replaced, StepListener
from halfstep.precision.casting.autocast import tensors_in
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.scaling.gradients import OneRank
from halfstep.precision.step import Precision

WORDS = {
    "weight": "largest weight",
    "update": "update to weight ratio",  # of norms, of sampled elements
    "gradient": "gradient norm",
    "activation": "largest output",
    "logit": "largest attention logit",  # a bound where F.scaled_dot_product_attention hides it
}
"""Quantities, and their names in messages; where several rise at one step, the first is named."""
LIMITS = {"weight": 4.0, "update": 15.0, "gradient": 10.0, "activation": 10.0, "logit": 10.0}
"""Times its median from which a quantity may be out."""
SPREADS = 6.0
"""Standard deviations, by the MAD of the logarithms, that it must be above the median, too."""
EXTREME = 10.0
"""Times its limit, and its largest value before, from which one step of a weight, an update or an
output is enough: a layer that dies has no third."""
USUAL = 1.5
"""Times what is usual among layers that a weight, an update or an output must be: the median of
their weights, and the largest of the others."""
WINDOW, FEWEST, CONFIRM = 128, 12, 3
"""Measured steps remembered; at least needed; and in a row that are out before that is said."""
INPUT = "the input"
Row = np.ndarray[Any, Any]
_OF_NORMAL = 1.4826  # from a MAD to a standard deviation


@dataclass(frozen=True, slots=True)
class Alarm:
    """A layer that leaves its own past."""

    layer: str
    quantity: str
    """A key of :data:`WORDS`."""
    since: int
    """The first step of those in a row at which it was out."""
    step: int
    """The step at which that was certain."""
    times: float
    """How many times its median it is now."""
    median: float

    def __str__(self) -> str:
        now = f"{self.times:.3g} times" if self.times < 1e290 else "not finite, far above"
        return (
            f"{self.layer or 'the model'}: {WORDS[self.quantity]} {now} its median of "
            f"{self.median:.3g} since step {self.since:,}"
        )


class LayerHealth(StepListener):
    """Measures each layer of a model that trains, and says which one leaves its own past.

    Weights and losses stay bit for bit what they are without it. The host waits once on a measured
    step. Up to step 16 each is measured, then 8 in each doubling, then every ``every``-th.

    Attributes:
        alarms: All so far, in the order in which they were certain.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Precision | Optimizer | Sequence[Optimizer] | None = None,
        *,
        scaler: Any = None,
        every: int = 100,
        to: str | Path | None = None,
        start: int = 0,
        tell: Callable[[str], object] | None = None,
        outputs: bool = True,
    ) -> None:
        """Begin to watch the loop's steps, until :meth:`close` or the end of a ``with`` block.

        Args:
            model: The model that is trained.
            source: The loop's :class:`halfstep.Precision`, its optimizer, or all of several that
                step in turn. None: any optimizer that holds one of the model's parameters. With a
                Precision of several ranks a number is the largest of all ranks, each of which
                measures its parts; otherwise it is this process's.
            scaler: The loop's gradient scaler, where it has one.
            every: Measure every this many steps.
            to: A file that gets a line of JSON for each measured step: ``health.jsonl``.
            start: Steps before this one's first, in a resumed run: its past is read from the file.
            tell: Called with the first alarm, and with another once all are over; None:
                :func:`warnings.warn`.
            outputs: Whether outputs and logits are measured, too, by hooks. They never are where
                ``torch.compile`` runs modules; pass False if it runs the loss as a whole, which
                would be compiled once more with the hooks.

        Raises:
            PrecisionError: If an argument is not one of these.
            CheckpointError: If the file of ``to`` cannot be written.
        """
        super().__init__("LayerHealth", model, source, scaler, every, to, start)
        self._ranks = OneRank() if self._precision is None else self._precision.ranks
        self._past = _Past([*_in_order(self._model)])
        self._tell = tell or (lambda text: warnings.warn(f"layer health: {text}", stacklevel=6))
        compiled = [hasattr(m, "_orig_mod") or m._compiled_call_impl for m in model.modules()]
        self._outputs = outputs and not any(compiled)
        self.alarms: list[Alarm] = []
        self._first: Alarm | None = None  # of those that stand
        self._unseen = 0  # the first of the last steps that tell nothing
        self._begin()
        # ranks must measure the same steps, and not all of them have the file
        if start and self._to is not None and isinstance(self._ranks, OneRank):
            for line in self._to.read_text(encoding="utf-8").splitlines()[-WINDOW:]:
                self._past.remember(self._past.row(json.loads(line)["layers"]))
        if self._precision is not None:
            self._precision.outcome.about_layers = self.about

    def close(self) -> None:
        """Leave the loop alone again; the alarms can still be read."""
        super().close()
        if self._precision is not None:
            self._precision.outcome.about_layers = lambda: ""

    def __enter__(self) -> Self:
        return self

    def __str__(self) -> str:
        """The alarms, one a line."""
        none = f"no layer has left its own past in {self._step:,} steps"
        if self._unseen:
            none = (
                f"no layer was seen to leave its own past before step {self._unseen:,}, which was "
                "skipped or not finite"
            )
        return "\n".join(map(str, self.alarms)) or none

    def about(self) -> str:
        """What the layers tell of a step that spikes, or is not finite; may be empty."""
        return f"; layer health: {self._first}" if self._past.alarmed else ""

    def _collect(self, step: int) -> _Step | None:
        between = min(self._every, 1 << max(step.bit_length() - 4, 0))
        if step % between and not self._past.unsure:
            return None
        return _Step(self._model if self._outputs else None)

    def stopped(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Measure the weights at which a run ends, if nothing of the step is measured."""
        if self.collector is None:
            self.collector = _Step(None)
            for name, weight in weights:
                self.collector.before(name, local_part(weight).detach())

    def _measured(self, applied: bool) -> None:
        step: _Step = self.collector
        if step.of_model:  # or somebody compiles what calls the model
            self._outputs &= step.called
        self._judge(self._read(step), applied)

    def _judge(self, found: Mapping[str, Mapping[str, float]], applied: bool) -> None:
        quiet = not self._past.alarmed
        broken = any(v == math.inf for one in found.values() for v in one.values())
        self._unseen = (self._unseen or self._step) if broken or not applied else 0
        alarms = self._past.judge(self._step, self._past.row(found), applied)
        found = found if applied else {}  # a past is of steps that were taken
        self.alarms += alarms
        if self._to is not None:
            layers = {
                name: {q: float(f"{v:.4g}") if v < math.inf else "inf" for q, v in one.items()}
                for name, one in found.items()
            }
            line = {"step": self._step, "layers": layers, "alarms": [*map(asdict, alarms)]}
            append_line(self._to, line)
        if alarms and quiet:  # what follows is likely to be its consequence
            self._first = alarms[0]
            self._tell(str(alarms[0]))

    def _read(self, step: _Step) -> dict[str, dict[str, float]]:
        """What a step measured, by layer and quantity; with several ranks the largest of theirs."""
        found = step.read()
        if isinstance(self._ranks, OneRank):
            return found
        keys = [(layer, q) for layer in self._past.layers for q in WORDS]
        mine = [found.get(layer, {}).get(q, 0.0) for layer, q in keys]
        table = torch.tensor(mine, dtype=torch.float64)
        self._ranks.worst_(table)
        every: dict[str, dict[str, float]] = {}
        for (layer, q), value in zip(keys, table.tolist(), strict=True):
            if value:
                every.setdefault(layer, {})[q] = value
        return every


def _in_order(module: nn.Module, name: str = "") -> Iterator[str]:
    """The names of modules in about the order in which their forwards end."""
    for key, child in module.named_children():
        yield from _in_order(child, f"{name}.{key}" if name else key)
    yield name


class _Step:
    """What is measured in one step: scalars on the device until :meth:`read`."""

    def __init__(self, model: nn.Module | None) -> None:
        """Begin; of a model's forwards outputs and attention are measured, too."""
        self.found: dict[tuple[str, str], list[Tensor]] = {}
        self.called, self.of_model = False, model is not None
        self._samples: dict[str, Tensor] = {}
        self._replaced: list[Replaced] = []
        self._last: Tensor | None = None
        self._modules: ModuleCalls | None = None
        if model is not None:
            self._modules = ModuleCalls(model, self._ended, begun=self._begun, passive=True)
            self._modules.hook()

    @property
    def empty(self) -> bool:
        """Whether nothing has been measured."""
        return not self.found

    def close(self) -> None:
        self._restore()
        self._last = None
        if self._modules is not None:
            self._modules.unhook()

    def _add(self, quantity: str, layer: str, value: Tensor) -> None:
        self.found.setdefault((quantity, layer), []).append(value)

    def gradient(self, name: str, gradient: Tensor, scale: float) -> None:
        values = gradient.coalesce().values() if gradient.is_sparse else local_part(gradient)
        norm = torch.linalg.vector_norm(values, dtype=_wide(values))
        self._add("gradient", name.rpartition(".")[0], norm / scale)

    def before(self, name: str, weight: Tensor) -> None:
        """Measure a weight's largest magnitude, and keep a sample."""
        if weight.numel():
            self._add("weight", name.rpartition(".")[0], _magnitude(weight))
            self._samples[name] = sampled(weight).clone()

    def after(self, name: str, weight: Tensor) -> None:
        """Measure how far a sample of a weight has moved."""
        before = self._samples.pop(name, None)
        if before is not None:
            layer, wide = name.rpartition(".")[0], _wide(before)
            change = sampled(weight).to(wide) - before.to(wide)
            self._add("change", layer, torch.linalg.vector_norm(change))
            self._add("length", layer, torch.linalg.vector_norm(before, dtype=wide))

    def read(self) -> dict[str, dict[str, float]]:
        """Each layer's quantities; the host waits once."""
        scalars = [value for values in self.found.values() for value in values]
        if not scalars:
            return {}
        device = scalars[0].device
        read = iter(torch.stack([s.float().to(device) for s in scalars]).tolist())
        sums: dict[str, dict[str, float]] = {}
        for (quantity, layer), values in self.found.items():
            numbers = [v if math.isfinite(v := next(read)) else math.inf for _ in values]
            whole = quantity in ("gradient", "change", "length")
            value = math.hypot(*numbers) if whole else max(numbers)
            sums.setdefault(layer, {})[quantity] = value
        for one in sums.values():
            change, length = one.pop("change", 0.0), one.pop("length", 0.0)
            one["update"] = change / length if length else 0.0
        return {name: {q: v for q, v in one.items() if v} for name, one in sums.items()}

    def _ended(self, call: Call, output: Any) -> None:
        for x in tensors_in(output) if call.learns else ():
            if _is_measured(x) and x is not self._last:  # or it is passed on as it came
                self._add("activation", call.name, _magnitude(_bare(x)))
                self._last = x
        if self._modules is not None and self._modules.running is None:
            self._restore()

    def _begun(self, args: Any) -> None:
        self.called = True
        for x in filter(_is_measured, tensors_in(args)):
            self._add("activation", INPUT, _magnitude(_bare(x)))
        for name, seen in (("scaled_dot_product_attention", self._attend), ("softmax", self._soft)):
            self._replaced.append(Replaced(F, name, seen))

    def _restore(self) -> None:
        while self._replaced:
            self._replaced.pop().undo()

    def _attend(self, original: Any, query: Tensor, key: Tensor, *args: Any, **how: Any) -> Any:
        layer = self._layer(query)
        if layer is not None:
            ends = [torch.linalg.vector_norm(_bare(x), dim=-1).float().amax() for x in (query, key)]
            scale = how.get("scale") or 1 / math.sqrt(query.shape[-1])
            self._add("logit", layer, ends[0] * ends[1] * scale)
        return original(query, key, *args, **how)

    def _soft(self, original: Any, input: Tensor, *args: Any, **how: Any) -> Any:
        layer = self._layer(input)
        if layer is not None and input.dim() > 2:
            self._add("logit", layer, _bare(input).amax().clamp_min(0))
        return original(input, *args, **how)

    def _layer(self, x: Tensor) -> str | None:
        """The layer whose forward attends; None where that is not measured."""
        if self._modules is None or not _is_measured(x) or not torch.is_grad_enabled():
            return None
        return self._modules.running


def _is_measured(x: Tensor) -> bool:
    numbers = x.is_floating_point() and x.numel() and not x.is_meta
    return bool(numbers) and not is_functorch_wrapped_tensor(x)


def _bare(x: Tensor) -> Tensor:
    return local_part(x.detach())


def _magnitude(x: Tensor) -> Tensor:
    """The largest magnitude; on a CPU the norm of order infinity takes 70 times as long."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Past:
    """The logarithms of the last measured steps, and which layers leave them.

    A row has one number for each pair of quantity and layer, NaN where there is none.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.layers = [INPUT, *dict.fromkeys(modules)]
        self._at = {layer: i for i, layer in enumerate(self.layers)}
        self._rows: list[Row] = []
        shape = len(WORDS), len(self.layers)
        self._streak = np.zeros(len(self.layers), dtype=int)
        self._since = np.zeros(shape, dtype=int)

    @property
    def unsure(self) -> bool:
        """Whether something is out, and not yet for long enough."""
        return bool(((self._streak > 0) & (self._streak < CONFIRM)).any())

    @property
    def alarmed(self) -> bool:
        """Whether something is out still."""
        return bool((self._streak >= CONFIRM).any())

    def row(self, found: Mapping[str, Mapping[str, Any]]) -> Row:
        """A step's numbers as logarithms, ``(quantities, layers)``."""
        row = np.full((len(WORDS), len(self.layers)), math.nan)
        for layer, numbers in found.items():
            for i, quantity in enumerate(WORDS):
                if layer in self._at and quantity in numbers:
                    row[i, self._at[layer]] = math.log(min(float(numbers[quantity]), 1e300))
        return row

    def remember(self, row: Row) -> None:
        """Add a measured step; what is not finite in it is left out."""
        self._rows = [*self._rows[1 - WINDOW :], np.where(row < 690, row, math.nan)]

    def judge(self, step: int, row: Row, applied: bool) -> list[Alarm]:
        """Compare a step with the ones before, and remember it; the first cause comes first.

        A step that was not applied tells nothing by what is not finite: a loss scale may have done
        that.
        """
        row = row if applied else np.where(row < 690, row, math.nan)
        out, excess, median, extreme = self._out(row)
        before = self._streak
        more = np.where(extreme.any(0), np.maximum(before + 1, CONFIRM), before + 1)
        self._streak = np.where(out.any(0), more, before * (not applied))
        self._since[:, self._streak == 0] = 0
        self._since[out & (self._since == 0)] = step
        if applied:
            self.remember(row)
        found = []
        for j in np.flatnonzero((self._streak >= CONFIRM) & (before < CONFIRM)):
            began = self._since[:, j]
            above = excess[:, j] > np.log([*LIMITS.values()])
            i = min(np.flatnonzero(above & (began > 0)), key=lambda k: (began[k], k))
            alarm = Alarm(
                layer=self.layers[j], quantity=[*WORDS][i], since=int(began[i]), step=step,
                times=math.exp(min(excess[i, j], 700.0)), median=math.exp(median[i, j]),
            )  # fmt: skip
            first = began[began > 0].min()
            found.append(((first, np.flatnonzero(began == first)[0], -excess[i, j], j), alarm))
        return [alarm for _, alarm in sorted(found, key=lambda pair: pair[0])]

    def _out(self, row: Row) -> tuple[Row, ...]:
        """What is out, its excess over its median, the median (as logarithms), what is extreme."""
        old = self._rows[: len(self._rows) - len(self._rows) // 4]
        if len(old) < FEWEST:
            nothing = np.full(row.shape, math.nan)
            return nothing > 0, nothing, nothing, nothing > 0
        seen = np.stack(old)
        median, limits = _median(seen), np.log([*LIMITS.values()])[:, None]
        spread = _OF_NORMAL * _median(np.abs(seen - median))
        excess = row - median
        shared = self._shared(excess)
        far = (excess - shared > limits) & (excess > SPREADS * spread)
        far &= (~np.isnan(seen)).sum(0) >= FEWEST
        usual = np.fmax.reduce(median, 1)  # what grows to that from near 0 learns
        usual[0], usual[[2, 4]] = _median(median[0]), -math.inf
        far &= row > usual[:, None] + math.log(USUAL)
        far[:, 0] = False  # the input is data
        # where others have left their past as well, one step does not tell which was first
        extreme = far & (excess - shared > limits + math.log(EXTREME))
        extreme &= (shared < limits) & (shared[0] < limits[0])
        extreme &= row > np.fmax.reduce(seen) + math.log(EXTREME)
        extreme[[2, 4]] = False  # a gradient and a logit are a batch's as much as a layer's
        return far, excess, median, extreme

    def _shared(self, excess: Row) -> Row:
        """The rise that is not a layer's own, at least 0."""
        known = np.where(np.isnan(excess), -math.inf, excess)
        shared = np.zeros_like(excess)
        weight, update, gradient, activation, logit = range(5)
        for quantity in (weight, update):  # of two layers the lower one's
            ordered = np.sort(excess[quantity])
            middle = ordered[max((~np.isnan(ordered)).sum() - 1, 0) // 2]
            shared[quantity] = 0.0 if math.isnan(middle) else middle
        # a gradient's rise that a neighbour shares came from outside of both
        has = np.flatnonzero(~np.isnan(excess[gradient]))
        around = np.pad(known[gradient][has], 1, constant_values=-math.inf)
        shared[gradient][has] = np.maximum(around[:-2], around[2:])
        before = np.maximum.accumulate(np.pad(known[activation], (1, 0))[:-1])
        shared[activation], shared[logit] = before, 2 * before
        return np.maximum(shared, 0.0)


def _median(values: Row) -> Row:
    """The median along the first axis without NaN, which sorting puts last."""
    ordered, count = np.sort(values, axis=0), (~np.isnan(values)).sum(0)
    ends = [
        np.take_along_axis(ordered, at[None].clip(0, len(values) - 1), 0)[0]
        for at in ((count - 1) // 2, count // 2)
    ]
    middle: Row = (ends[0] + ends[1]) / 2
    return middle
