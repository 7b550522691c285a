"""Counts what a forward saves for its backward, each storage once; and a whole step's memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from halfstep.diagnostics.memory.table import Memory
from halfstep.errors import PrecisionError
from halfstep.optim.state import REMAINDER
from halfstep.precision.border import require
from halfstep.precision.casting.autocast import tensors_in
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.policy.policy import dtype_name
from halfstep.precision.step import Precision

_VIEWS = frozenset({"TBackward0", "ViewBackward0", "TransposeBackward0", "UnsafeViewBackward0",
                    "AsStridedBackward0", "ExpandBackward0", "PermuteBackward0"})  # fmt: skip
_CASTS = frozenset({"ToCopyBackward0"})
Bytes = dict[str, dict[str, int]]


class SavedTensors:
    """A context that records the storages which autograd saves in it.

    Args:
        model: Its parameters and buffers exist anyway: their storages are not counted.
        batch: Inputs and targets, which are counted as such.
        logits: The last dimension of the logits, which tells them from other activations;
            0: not told apart.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Iterable[Tensor] = (),
        logits: int = 0,
    ) -> None:
        self._held = {id(s): s for s in map(_storage, (*model.parameters(), *model.buffers()))}
        self._parameters: dict[torch.Size, list[Tensor]] = {}
        for parameter in model.parameters():
            self._parameters.setdefault(parameter.shape, []).append(parameter)
        self._batch = {id(s): s for s in map(_storage, batch)}
        self._logits = logits
        self._round: dict[int, tuple[Any, str, str]] = {}
        self._largest: Bytes = {}
        self._used = False
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._end()

    @property
    def bytes(self) -> Bytes:
        """Part and dtype to bytes, of the forward that saved the most."""
        self._end()
        return self._largest

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._used:  # a backward has begun since: this is the next micro-batch
            self._end()
        storage = _storage(tensor)
        if id(storage) not in self._held and id(storage) not in self._round:
            part = "batch" if id(storage) in self._batch else self._part_of(tensor)
            self._round[id(storage)] = (storage, part, dtype_name(tensor.dtype))
        return tensor

    def _unpack(self, tensor: Tensor) -> Tensor:
        self._used = True
        return tensor

    def _end(self) -> None:
        found = _sums((part, form, s.nbytes()) for s, part, form in self._round.values())
        if _total(found) > _total(self._largest):
            self._largest = found
        self._round, self._used = {}, False

    def _is_cast_copy(self, tensor: Tensor) -> bool:
        """Tell whether a tensor without a graph holds a parameter's numbers in another dtype.

        So an autograd function keeps a parameter that it has cast itself.
        """
        if tensor.grad_fn is not None or is_fake(tensor):
            return False
        same = self._parameters.get(tensor.shape, ())
        return any(p.dtype != tensor.dtype and bool(tensor.eq(p.to(tensor.dtype)).all())
                   for p in same)  # fmt: skip

    def _part_of(self, tensor: Tensor) -> str:
        if _is_cast_parameter(tensor) or self._is_cast_copy(tensor):
            return "cast copies"
        if self._logits and tensor.dim() > 1 and tensor.shape[-1] == self._logits:
            return "logits"
        return "activations"


class MemoryMeter:
    """Measures what one training step holds, by kind and dtype; a context around the step.

    ::

        with halfstep.MemoryMeter(precision) as meter:
            with precision.autocast():
                loss = model(**batch).loss
            precision.step(loss)
        print(meter.memory)
        print(meter.memory.why_not_half())

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

        Raises:
            PrecisionError: If ``precision`` is not a Precision.
        """
        self._precision = require(
            precision, Precision, "MemoryMeter(precision)", "a halfstep.Precision"
        )
        self._batch = list(tensors_in(batch))
        model = precision.model
        self._saved = SavedTensors(model, self._batch, logits)
        self._memory: Memory | None = None
        self._gradients: dict[int, tuple[str, int]] = {}
        self._stepped: dict[int, tuple[str, int]] = {}
        self._handles: list[Any] = []

    @property
    def memory(self) -> Memory:
        """What was measured.

        Raises:
            PrecisionError: Before the context has ended.
        """
        if self._memory is None:
            raise PrecisionError("MemoryMeter.memory: no step has ended in its context yet")
        return self._memory

    def __enter__(self) -> MemoryMeter:
        self._saved.__enter__()
        self._handles = [
            p.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            for p in self._precision.model.parameters()
            if p.requires_grad
        ]
        self._handles += [o.register_step_pre_hook(self._stepping) for o in self._optimizers()]
        return self

    def _optimizers(self) -> list[Optimizer]:
        return list(self._precision.optimizers)

    def __exit__(self, *error: object) -> None:
        self._saved.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        if error[0] is None:
            self._memory = self._count()

    def _arrived(self, parameter: Tensor) -> None:
        """Note a gradient's size before the step takes it."""
        self._note(self._gradients, parameter)

    def _stepping(self, optimizer: Optimizer, *_: object) -> None:
        """Note the gradients that a step takes: of masters, where those are what it updates."""
        for group in optimizer.param_groups:
            for target in group["params"]:
                self._note(self._stepped, target)

    @staticmethod
    def _note(sizes: dict[int, tuple[str, int]], tensor: Tensor) -> None:
        if tensor.grad is not None:
            grad = local_part(tensor.grad)
            sizes[id(tensor)] = (dtype_name(grad.dtype), grad.nbytes)

    def _count(self) -> Memory:
        precision = self._precision
        model: nn.Module = precision.model
        weights = [*model.parameters(), *model.buffers()]
        rows = [("weights", t, dtype_name(t.dtype)) for t in weights]
        masters = _distinct(precision.masters.named_parameters().values(), weights)
        rows += [("masters", t, dtype_name(t.dtype)) for t in masters]
        for optimizer in precision.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim():  # step counters have none
                        left = key == REMAINDER
                        form = "remainder" if left else dtype_name(value.dtype)
                        rows.append(("masters" if left else "moments", value, form))
        found = _sums((part, form, local_part(t).nbytes) for part, t, form in rows)
        found |= self._saved.bytes
        sizes = max(self._gradients, self._stepped, key=lambda s: sum(n for _, n in s.values()))
        found |= _sums(("gradients", form, size) for form, size in sizes.values())
        found["batch"] = _sums(("batch", dtype_name(t.dtype), t.nbytes) for t in self._batch).get(
            "batch", {}
        )
        length = len(self._batch[0]) if self._batch and self._batch[0].dim() else 0
        return Memory(str(precision.policy), True, found, length)


def _distinct(tensors: Iterable[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Those that share no memory with the others."""
    known = {id(_storage(t)) for t in others}
    return [t for t in tensors if id(_storage(t)) not in known]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local_part(tensor).untyped_storage()


def _is_cast_parameter(tensor: Tensor) -> bool:
    """Whether a saved tensor is a parameter's cast, or a view of one."""
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
