"""The bytes of a training step as a value: what holds them, and in which dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from halfstep.precision.casting.autocast import tensors_in
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.masters.rounding import REMAINDER
from halfstep.precision.masters.states import MASTER
from halfstep.precision.policy.policy import dtype_name
from halfstep.precision.step import Precision
from halfstep.shown import aligned

PARTS = {
    "weights": "parameters and buffers",
    "masters": "fp32 copies that the optimizer updates, and remainders",
    "gradients": "of all trained parameters",
    "moments": "the optimizer's running averages",
    "cast copies": "16-bit copies of fp32 weights, kept from forward to backward",
    "activations": "saved by the forward for the backward",
    "logits": "saved tensors of the logits' size: the loss computes in fp32",
    "batch": "inputs and targets",
}
"""Part of the memory to its meaning."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a training step holds, at the end of its forward and with all gradients.

    Temporary tensors of single operations, the allocator's rounding and the process itself come on
    top.

    Attributes:
        policy: The policy's name.
        bytes: Part and dtype to bytes, as ``{"logits": {"fp32": 4096}}``.
    """

    policy: str
    bytes: Mapping[str, Mapping[str, int]]

    def part(self, name: str) -> int:
        """Bytes of one part, in all dtypes."""
        return sum(self.bytes.get(name, {}).values())

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(map(self.part, PARTS))

    def __str__(self) -> str:
        rows = [("part", "bytes", "by dtype")]
        for name in PARTS:
            found = self.bytes.get(name, {})
            if self.part(name):
                forms = ", ".join(f"{dtype} {size_text(size)}" for dtype, size in found.items())
                rows.append((name, size_text(self.part(name)), forms))
        rows.append(("total", size_text(self.total), self.policy))
        return aligned(rows, {1})


def parts_table(several: Sequence[Memory]) -> str:
    """Align the parts of several steps, one a row, with their share of the first one's total."""
    parts = [part for part in PARTS if any(one.part(part) for one in several)]
    rows = [("policy", *parts, "total", f"vs {several[0].policy}")]
    for one in several:
        sizes = [size_text(one.part(p)) if one.part(p) else "-" for p in parts]
        share = f"{one.total / several[0].total:.2f}"
        rows.append((one.policy, *sizes, size_text(one.total), share))
    return aligned(rows, range(1, len(rows[0])))


def size_text(size: float) -> str:
    """Bytes with a unit of 1000: ``59.3 MB``."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


_VIEWS = frozenset({"TBackward0", "ViewBackward0", "TransposeBackward0", "UnsafeViewBackward0",
                    "AsStridedBackward0", "ExpandBackward0", "PermuteBackward0",
                    "SelectBackward0"})  # fmt: skip
_CASTS = frozenset({"ToCopyBackward0"})
Bytes = dict[str, dict[str, int]]


class MemoryMeter:
    """Measures what one training step holds, by kind and dtype; a context around the step.

    ::

        with halfstep.MemoryMeter(precision) as meter:
            with precision.autocast():
                loss = model(**batch).loss
            precision.step(loss)
        print(meter.memory)

    Of several micro-batches the one that saves the most counts. The step is computed as without
    it; tensors that it saves live until the context ends.
    """

    def __init__(self, precision: Precision, batch: object = (), *, logits: int = 0) -> None:
        """Prepare to count.

        Args:
            precision: What the step is taken with.
            batch: Inputs and targets, in any nesting, to count them apart.
            logits: The number of classes or tokens, which tells saved logits from other
                activations.
        """
        self._precision = precision
        self._batch, self._logits = list(tensors_in(batch)), logits
        weights = (*precision.model.parameters(), *precision.model.buffers())
        self._weights = {id(s): s for s in map(_storage, weights)}
        self._inputs = {id(s): s for s in map(_storage, self._batch)}
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._saved: dict[int, tuple[Any, str, str]] = {}  # of the running micro-batch
        self._largest: Bytes = {}  # saved by the micro-batch that saved the most
        self._used = False  # whether the running micro-batch's backward has begun
        self.memory: Any = None
        """What was measured, a :class:`Memory`; None until the context has ended."""
        self._gradients: dict[int, tuple[str, int]] = {}
        self._stepped: dict[int, tuple[str, int]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> MemoryMeter:
        self._hooks.__enter__()
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._note, self._gradients))  # type: ignore[no-untyped-call]
            for p in self._precision.model.parameters()
            if p.requires_grad
        ]
        self._handles += [
            o.register_step_pre_hook(self._stepping) for o in self._precision.optimizers
        ]
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._end()
        for handle in self._handles:
            handle.remove()
        if error[0] is None:
            self.memory = self._count()

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._used:  # a backward has begun since: this is the next micro-batch
            self._end()
        storage = _storage(tensor)
        if id(storage) not in self._weights and id(storage) not in self._saved:
            part = "batch" if id(storage) in self._inputs else self._part_of(tensor)
            self._saved[id(storage)] = (storage, part, dtype_name(tensor.dtype))
        return tensor

    def _unpack(self, tensor: Tensor) -> Tensor:
        self._used = True
        return tensor

    def _end(self) -> None:
        found = _sums((part, form, s.nbytes()) for s, part, form in self._saved.values())
        if _total(found) > _total(self._largest):
            self._largest = found
        self._saved, self._used = {}, False

    def _part_of(self, tensor: Tensor) -> str:
        if _is_cast_parameter(tensor):
            return "cast copies"
        if self._logits and tensor.dim() > 1 and tensor.shape[-1] == self._logits:
            return "logits"
        return "activations"

    def _stepping(self, optimizer: Optimizer, *_: object) -> None:
        """Note the gradients that a step takes: of masters, where those are what it updates."""
        for group in optimizer.param_groups:
            for target in group["params"]:
                self._note(self._stepped, target)

    @staticmethod
    def _note(sizes: dict[int, tuple[str, int]], tensor: Tensor) -> None:
        """Note a gradient's size before the step takes it."""
        if tensor.grad is not None:
            grad = local_part(tensor.grad)
            sizes[id(tensor)] = (dtype_name(grad.dtype), grad.nbytes)

    def _count(self) -> Memory:
        precision = self._precision
        model: nn.Module = precision.model
        weights = [*model.parameters(), *model.buffers()]
        rows = [("weights", t, dtype_name(t.dtype)) for t in weights]
        known = {id(_storage(t)) for t in weights}
        targets = precision.masters.named_parameters().values()
        masters = [t for t in targets if id(_storage(t)) not in known]
        rows += [("masters", t, dtype_name(t.dtype)) for t in masters]
        for optimizer in precision.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    # step counters have no dimension, and masters are counted above
                    if isinstance(value, Tensor) and value.dim() and key != MASTER:
                        left = key == REMAINDER
                        form = "remainder" if left else dtype_name(value.dtype)
                        rows.append(("masters" if left else "moments", value, form))
        found = _sums((part, form, local_part(t).nbytes) for part, t, form in rows)
        found |= self._largest
        sizes = max(self._gradients, self._stepped, key=lambda s: sum(n for _, n in s.values()))
        found |= _sums(("gradients", form, size) for form, size in sizes.values())
        found |= _sums(("batch", dtype_name(t.dtype), t.nbytes) for t in self._batch)
        return Memory(str(precision.policy), found)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local_part(tensor).untyped_storage()


def _is_cast_parameter(tensor: Tensor) -> bool:
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() not in _CASTS:
        return False
    before = node.next_functions[0][0]
    return before is not None and "AccumulateGrad" in before.name()


def _sums(rows: Iterable[tuple[str, str, int]]) -> Bytes:
    found: Bytes = {}
    for part, form, size in rows:
        forms = found.setdefault(part, {})
        forms[form] = forms.get(form, 0) + size
    return found


def _total(found: Bytes) -> int:
    return sum(sum(forms.values()) for forms in found.values())
