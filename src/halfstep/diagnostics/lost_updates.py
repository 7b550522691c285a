"""Samples a parameter group before and after a step, and says what rounding lost of its updates.

Sampling only queues copies from device to device: nothing waits, and training is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.optim.moments import BLOCK
from halfstep.optim.state import CODES, REMAINDER, TOPS
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.masters.rounding import ROUNDING, RoundingMode, Update, master, random_key
from halfstep.precision.masters.stepping import DeviceDecision, OwnOptimizer
from halfstep.precision.policy.policy import dtype_name
from halfstep.shown import aligned

_FEW = 16  # least number of elements sampled from a tensor


@dataclass(slots=True)
class Sample:
    """Some elements of one tensor before and after a step; its tensors have shape (k,)."""

    name: str
    numel: int  # number of elements of the whole tensor
    update: Update  # rounding mode of the weight
    weight: Tensor  # the weight before the step
    # The step's gradient, before ``multiplier`` and loss scale; empty if there was none.
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    # The optimizer's state before the step; tensors of the parameter's shape are sampled.
    state: dict[str, Any] = field(default_factory=dict)
    after: Tensor = field(default_factory=lambda: torch.empty(0))  # the weight after the step
    remainder: Tensor | None = None  # the remainder before the step
    remainder_after: Tensor | None = None

    def on_cpu(self) -> Sample:
        """A copy on the CPU; synchronises."""
        copy = Sample(**{f.name: _on_cpu(getattr(self, f.name)) for f in fields(self)})
        if copy.remainder is None and copy.remainder_after is not None:  # created by the step
            copy.remainder = torch.zeros_like(copy.remainder_after)
        return copy

    def value(self) -> Tensor:
        """The exact weight before the step: fp32, or fp64 for an fp64 weight."""
        if self.weight.dtype == torch.float64:
            return self.weight
        return master(self.weight, self.remainder, self.update)


@dataclass(slots=True)
class GroupSample:
    """The samples of one parameter group before and after a step."""

    options: dict[str, Any]  # the group's options at the step
    samples: list[Sample] = field(default_factory=list)  # one per tensor with a gradient
    sparse: int = 0  # number of tensors left out because their gradients are sparse
    # The samples' tensors and element indices; emptied after the step.
    places: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(slots=True)
class StepSample:
    """The samples of one optimizer before and after a step, still on the device."""

    number: int  # number of the step, from 1
    multiplier: float | Tensor  # the step's factor of gradients
    scale: Tensor | None  # a GradScaler's scale, by which the step divides gradients
    # the flag of that scaler, or of a step on the device: above 0 if the step changes nothing
    found: Tensor | None
    late: bool  # whether a closure computes the gradients within the step
    groups: list[GroupSample] = field(default_factory=list)


class Chooser:
    """Chooses the elements to sample of each tensor, the same ones at every step."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self._chosen: dict[tuple[int, int, int, torch.device], Tensor] = {}

    def __call__(self, place: tuple[int, int], tensor: Tensor, total: int) -> Tensor:
        """Element indices, int64 in ascending order, on the tensor's device.

        ``place`` is the index of the group and of the tensor in it; the group has ``total``
        elements.
        """
        size = tensor.numel()
        key = (*place, size, tensor.device)
        if key in self._chosen:
            return self._chosen[key]
        count = min(size, max(_FEW, round(self._samples * size / total)))
        generator = torch.Generator().manual_seed(random_key(self._seed, *place))
        if size <= 4 * count:
            index = torch.randperm(size, generator=generator)[:count].sort().values
        else:  # duplicates are rare, and a permutation of a large tensor is large
            index = torch.unique(torch.randint(size, (count,), generator=generator))
        self._chosen[key] = index.to(tensor.device)
        return self._chosen[key]


def is_own(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of halfstep's, whose update rule can be called directly."""
    return isinstance(optimizer, OwnOptimizer)


def before_step(
    optimizer: Optimizer,
    number: int,
    choose: Chooser,
    names: Mapping[Tensor, str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> StepSample:
    """Sample everything that step ``number`` is about to use.

    ``args`` are the step's as hooks get them: the optimizer, and perhaps a closure. ``gradients``
    and ``multiplier`` in ``kwargs`` are used if the optimizer is halfstep's.
    """
    own = is_own(optimizer)
    given: Mapping[Tensor, Tensor] | None = kwargs.get("gradients") if own else None
    multiplier = kwargs.get("multiplier", 1.0) if own else 1.0
    found = getattr(optimizer, "found_inf", None)
    if isinstance(multiplier, DeviceDecision):
        found, multiplier = multiplier.found, multiplier.multiplier
    step = StepSample(
        number,
        _copy(multiplier),
        _copy(getattr(optimizer, "grad_scale", None)),
        _copy(found),
        late=(args[1] if len(args) > 1 else kwargs.get("closure")) is not None,
    )
    for number, group in enumerate(optimizer.param_groups):
        step.groups.append(_sample_group(optimizer, number, group, choose, names, given, step.late))
    return step


def _sample_group(
    optimizer: Optimizer,
    number: int,
    group: dict[str, Any],
    choose: Chooser,
    names: Mapping[Tensor, str],
    given: Mapping[Tensor, Tensor] | None,
    late: bool,
) -> GroupSample:
    own, own_names = is_own(optimizer), group.get("param_names")
    found = GroupSample(
        {k: _copy(v) for k, v in group.items() if k not in ("params", "param_names")}
    )
    total = sum(local(each).numel() for each in group["params"])
    for j, parameter in enumerate(group["params"]):
        gradient = parameter.grad if given is None else given.get(parameter)
        tensor = local(parameter.detach())
        if not tensor.numel() or (gradient is None and not late):
            continue
        if gradient is not None and gradient.is_sparse:
            found.sparse += 1
            continue
        index = choose((number, j), tensor, total)
        name = own_names[j] if own_names else f"tensor {j} of shape {tuple(parameter.shape)}"
        update = group["update"] if own and tensor.dtype == torch.bfloat16 else None
        sample = Sample(
            names.get(parameter, name),
            tensor.numel(),
            update or "nearest",
            torch.take(tensor, index),
            state=sampled_state(optimizer.state.get(parameter, {}), parameter, index),
        )
        if gradient is not None:
            sample.gradient = torch.take(local(gradient), index)
        if own:
            sample.remainder = sample.state.pop(REMAINDER, None)
        found.samples.append(sample)
        found.places.append((parameter, index))
    return found


def after_step(optimizer: Optimizer, step: StepSample) -> None:
    """Sample the weights and remainders after the step, into the result of :func:`before_step`."""
    own = is_own(optimizer)
    for group in step.groups:
        for (parameter, index), sample in zip(group.places, group.samples, strict=True):
            sample.after = torch.take(local(parameter.detach()), index)
            held = optimizer.state.get(parameter, {}).get(REMAINDER) if own else None
            if held is not None:
                sample.remainder_after = torch.take(held, index)
            if step.late and parameter.grad is not None and not parameter.grad.is_sparse:
                sample.gradient = torch.take(local(parameter.grad), index)
        group.places = []


def sampled_state(state: Mapping[str, Any], parameter: Tensor, index: Tensor) -> dict[str, Any]:
    """The state of some elements; values without the parameter's shape are copied whole."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and key.endswith(TOPS):
            codes = local(state[key.removesuffix(TOPS) + CODES])
            found[key] = torch.take(value, _in_memory(index, codes) // BLOCK)
        elif isinstance(value, Tensor) and value.shape == parameter.shape:
            found[key] = torch.take(local(value), index)
        else:
            found[key] = _copy(value)
    return found


def _in_memory(index: Tensor, tensor: Tensor) -> Tensor:
    """The memory offsets of elements given by their indices, for a dense tensor."""
    if tensor.is_contiguous():
        return index
    place = torch.zeros_like(index)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        place += index % size * stride
        index = index // size
    return place


def local(tensor: Tensor) -> Tensor:
    """This process' part of a tensor; the type check avoids slow look-ups of attributes."""
    return tensor if type(tensor) in (Tensor, nn.Parameter) else local_part(tensor)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_cpu(held) for key, held in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


LOUD = 0.1
"""The share of lost updates from which on the user is warned without asking."""
_TELLING = 0.01  # share of the peak learning rate above which a measured step tells something
_ADVISE = 0.01  # share of lost updates from which on another rounding mode is recommended
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def lost_share(measured: Iterable[tuple[float, float]], peak: float) -> float:
    """The share of its updates that a parameter group loses over a run, to be judged by LOUD.

    It is the median of the measured steps whose learning rate is above 1 % of the peak: at the end
    of a schedule updates are below half a gap of any format, fp32 too, and the run lacks nothing.

    Args:
        measured: Of each measured step the learning rate, NaN if not known, and the share lost.
        peak: The run's largest learning rate, or NaN.

    Returns:
        NaN if no measured step tells.
    """
    shares = [
        share for rate, share in measured if math.isfinite(share) and not rate <= _TELLING * peak
    ]
    return median(shares) if shares else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One parameter group on one measured step; shares are from 0 to 1, estimated from a sample.

    An *update* is an element whose intended change is not zero. The intended change is what the
    same step would do to a weight held in fp64, from the same gradient and moments.
    """

    group: str
    """The group's ``name``, or its number and weight decay."""
    step: int
    """The measured step, counted from 1 over applied steps."""
    learning_rate: float
    """The learning rate of that step; NaN if the group has no ``lr``."""
    elements: int
    """Number of elements of the group that had a gradient."""
    stored: str
    """How the weights are stored: ``"bf16"``, ``"bf16 split"``, ``"fp32"``."""
    lost: float
    """Share of updates that are lost for good: the stored bits (weight and remainder) did not
    change, and stochastic rounding would not move them on average either. NaN if the intended
    update is not known."""
    unmoved: float
    """Share of updates that did not change the stored bits, by chance or for good. If the intended
    update is not known, it is the share of the elements with a nonzero gradient."""
    zero: float
    """Share of all elements whose intended update is exactly zero."""
    stuck: tuple[str, ...]
    """Names of tensors all of whose sampled updates were lost."""
    tensors: int
    """Number of tensors of the group that had a gradient."""
    note: str = ""
    """What is not known, and why."""

    @property
    def verdict(self) -> str:
        """One line of text: what is lost, at which learning rate, and what helps."""
        if math.isnan(self.lost):
            text = f"{_percent(self.unmoved)} of weights with a gradient did not change"
            return f"{text}; {self.note}"
        if self.zero == 1:
            return self._noted("no update: every intended update is zero")
        return self._noted(self._loss)

    @property
    def _loss(self) -> str:
        if self.lost == 0:
            if self._random:
                return (
                    f"moves on average; {_percent(self.unmoved)} of single updates leave the "
                    "weight where it is, which is right on average"
                )
            return "none lost"
        rate = f"at lr {self.learning_rate:.3g}"
        if not self.advice:
            return f"{_percent(self.lost)} of updates {rate} are below the last bit of fp32"
        text = f"{_percent(self.lost)} of updates are lost {rate}"
        if self.lost >= _ADVISE or self.stuck:
            text += f": use {self.advice}"
        if self.stuck and self.lost < 1:
            some = ", ".join(self.stuck[:3]) + (", ..." if len(self.stuck) > 3 else "")
            text += f"; {len(self.stuck)} of {self.tensors} tensors do not move: {some}"
        return text

    @property
    def _modes(self) -> list[RoundingMode]:
        words = self.stored.replace(",", "").split()
        found = [ROUNDING[word] for word in words if word in ROUNDING]
        return found or [ROUNDING["nearest"]] * ("bf16" in words)

    @property
    def _random(self) -> bool:
        return any(mode.random for mode in self._modes)

    @property
    def advice(self) -> str:
        """Policies that lose less; empty where 23 mantissa bits are kept, as none keeps more."""
        if "fp16" in self.stored:
            return "fp16-master"
        return next((mode.advice for mode in self._modes if mode.advice), "")

    def _noted(self, text: str) -> str:
        return f"{text}; {self.note}" if self.note else text


def lost_table(reports: Sequence[GroupReport]) -> str:
    """Reports as text: a table with one row per group, then one verdict per group."""
    head = ("group", "stored", "elements", "lr", "lost", "unmoved", "zero")
    rows = [head] + [
        (
            r.group,
            r.stored,
            f"{r.elements:,}",
            f"{r.learning_rate:.3g}",
            *(_percent(share) for share in (r.lost, r.unmoved, r.zero)),
        )
        for r in reports
    ]
    table = aligned(rows, range(2, len(head)))
    return "\n".join([table, *(f"{r.group}: {r.verdict}" for r in reports)])


def measure(
    group: str,
    step: int,
    learning_rate: float,
    samples: Sequence[Sample],
    updates: Sequence[Tensor] | str,
    note: str,
) -> GroupReport:
    """Compare intended updates with the stored weights.

    ``samples`` are on the CPU. ``updates`` come from the replay, fp64 (k,) each, or are text that
    says why they are not known.
    """
    shares = torch.cat(  # weight of a sampled element: its tensor's elements per sample
        [torch.full_like(s.weight, s.numel / len(s.weight), dtype=torch.float64) for s in samples]
    )
    same = torch.cat([_unmoved(s) for s in samples])
    known, changes = not isinstance(updates, str), [s.gradient for s in samples]
    if isinstance(updates, str):
        note = f"the intended update is not known: {updates}"
    else:
        changes = [*updates]
    moving = torch.cat([change != 0 for change in changes])
    lost, every = same & moving, torch.ones_like(moving)
    stuck: tuple[str, ...] = ()
    if known:
        fine = [_below_fp32(s, u) for s, u in zip(samples, changes, strict=True)]
        lost &= torch.cat(fine)
        parts = torch.split(lost, [s.weight.numel() for s in samples])
        stuck = tuple(
            s.name
            for s, part, change in zip(samples, parts, changes, strict=True)
            if bool((change != 0).any()) and torch.equal(part, change != 0)
        )
    return GroupReport(
        group=group,
        step=step,
        learning_rate=learning_rate,
        elements=sum(s.numel for s in samples),
        stored=", ".join(sorted({_stored(s) for s in samples})),
        lost=_share(lost, moving, shares) if known else float("nan"),
        unmoved=_share(same & moving, moving, shares),
        zero=_share(~moving, every, shares),
        stuck=stuck,
        tensors=len(samples),
        note=note,
    )


def _stored(sample: Sample) -> str:
    name = dtype_name(sample.weight.dtype)
    return name if sample.update == "nearest" else f"{name} {sample.update}"


def _unmoved(sample: Sample) -> Tensor:
    same = _same_bits(sample.weight, sample.after)
    if sample.remainder is not None and sample.remainder_after is not None:
        same &= _same_bits(sample.remainder, sample.remainder_after)
    return same


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    bits = _BITS[a.element_size()]
    return a.view(bits) == b.view(bits)


def _below_fp32(sample: Sample, update: Tensor) -> Tensor:
    """A mask of weights that this update can never move; with random rounding only some."""
    if not ROUNDING[sample.update].random:
        return torch.ones_like(update, dtype=torch.bool)
    value = sample.value()
    return (value.double() + update).float() == value


def _share(part: Tensor, whole: Tensor, shares: Tensor) -> float:
    total = float(shares[whole].sum())
    return float(shares[part].sum()) / total if total else 0.0


def _percent(share: float) -> str:
    return "?" if math.isnan(share) else f"{100 * share:.3g} %"
