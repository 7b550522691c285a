"""What the ranks of a run must agree on before a step: its loss, its norm, and what is broken.

Whether a step is applied depends on the gradients' norm and on the loss. Each rank may hold a part
of the parameters, a share of the batch or both; a decision by its own numbers alone would let one
rank step and another skip, after which their weights and loss scales differ for good. Here every
rank adds its share to the same sum, over all ranks of all mesh axes, in one collective per step:
NaN or inf in anybody's share is NaN or inf in everybody's sum, and so the MAX of the flag.

Nothing about a parameter that is no DTensor shows whether ranks hold copies of it or parts. Layers
that are split by hand say so with a mark (:data:`MARK`); :func:`check_replicas` refuses those that
do not.

**Source:** Megatron-Core reduces ``found_inf`` with MAX over all model-parallel ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import PrecisionError
from halfstep.precision.border import as_device, require
from halfstep.precision.masters.local_part import is_sharded, parts_of
from halfstep.precision.scaling.gradients import Gradients, NonFinite, Norm, OneRank, Ranks

MARK = "tensor_model_parallel"
"""The attribute, True, of a plain parameter of which every model-parallel rank holds another part.

**Source:** Megatron-Core, ``core/tensor_parallel/layers.py``, marks its split parameters so.
"""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ManyRanks:
    """All ranks of ``torch.distributed``'s default group; each must call each step."""

    def __init__(
        self,
        device: str | torch.device,
        *,
        loss_share: float | None = None,
        model_parallel: int | None = None,
    ) -> None:
        """Take part in the default group, which must exist.

        Args:
            device: Where the ranks' sums are made: one that the group's backend serves, or its
                name.
            loss_share: What a rank's loss counts in the step's. None: 1 / number of ranks, the mean
                of the ranks' losses, as with DDP and FSDP2 by themselves, which average gradients.
                1 where ranks have different parts of a sum.
            model_parallel: How many ranks share one copy of the model, where layers are split by
                hand: of a plain parameter with the attribute ``tensor_model_parallel = True`` each
                of them holds another part. None: all ranks of the group.

        Raises:
            PrecisionError: If ``model_parallel`` does not divide the number of ranks, or no
                process group has been initialised.
        """
        self._device = as_device(device)
        if not dist.is_available() or not dist.is_initialized():
            raise PrecisionError(
                "ManyRanks: there is no default process group to agree in; call "
                "torch.distributed.init_process_group, or halfstep.distributed.open_world, before "
                "it. Allowed without one: halfstep.OneRank()"
            )
        self._size = dist.get_world_size()
        self._loss_share = 1 / self._size if loss_share is None else loss_share
        self._model_parallel = self._size if model_parallel is None else model_parallel
        if self._model_parallel < 1 or self._size % self._model_parallel:
            raise PrecisionError(
                f"model_parallel={model_parallel} does not divide the {self._size} ranks; give the "
                "number of ranks that share one copy of the model"
            )

    def parts_of(self, parameter: Tensor) -> int:
        """What a DTensor's mesh says; of a plain tensor, what its mark says (:data:`MARK`)."""
        if not is_sharded(parameter) and getattr(parameter, MARK, False):
            return self._model_parallel
        return parts_of(parameter)

    def measure(self, loss: Tensor, gradients: Gradients, norm: Norm) -> tuple[float, float]:
        """The sum of the ranks' shares, in fp64; the same bits on every rank.

        A part that ``n`` of the ``size`` ranks hold different parts of is there ``size / n`` times.

        Raises:
            PrecisionError: If another rank cannot step.
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        sums[0] = loss.double() * self._loss_share
        for parts, some in gradients.items():
            if some:
                sums[1] += norm(some).double().to(self._device).square() * parts
        dist.all_reduce(sums)
        value, squares, unable = sums.tolist()
        if unable:
            raise PrecisionError(
                f"{unable:g} of {self._size} ranks could not take this step, so none does; the "
                "error that was raised there says why"
            )
        # rounded to fp32, the loss of two ranks is that of two micro-batches on one device
        value = torch.tensor(value, dtype=torch.float32).item()
        return value, math.sqrt(squares / self._size) if squares >= 0 else math.nan

    def cannot(self) -> None:
        """Tell the others, who are in :meth:`measure` or come there."""
        dist.all_reduce(torch.tensor([0, 0, 1], dtype=torch.float64, device=self._device))

    def worst(self, marks: Sequence[int]) -> list[int]:
        """The largest of all ranks' marks, place by place; numbers only, nothing is unpickled."""
        if not marks:
            return []
        table = torch.tensor(marks, dtype=torch.int32, device=self._device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        worst: list[int] = table.tolist()
        return worst

    def worst_(self, marks: Tensor) -> None:
        """The largest of all ranks' marks, element by element, in place."""
        if marks.device == self._device:
            dist.all_reduce(marks, op=dist.ReduceOp.MAX)
        else:
            moved = marks.to(self._device)
            dist.all_reduce(moved, op=dist.ReduceOp.MAX)
            marks.copy_(moved)

    def union(self, found: NonFinite, names: Sequence[str]) -> NonFinite:
        """NaN goes before inf where ranks found both in one tensor's parts."""
        nan, inf = set(found.nan), set(found.inf)
        marks = self.worst([2 if name in nan else int(name in inf) for name in names])
        marked = list(zip(names, marks, strict=True))
        return NonFinite(
            tuple(name for name, mark in marked if mark == 2),
            tuple(name for name, mark in marked if mark == 1),
        )


def ranks_of_this_process(device: torch.device) -> Ranks:
    """All ranks where ``torch.distributed`` is initialised for several, else this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return ManyRanks(device)
    return OneRank()


def as_ranks(value: object) -> Ranks:
    """What ranks agree by: :class:`OneRank`, :class:`ManyRanks`, or one's own :class:`Ranks`."""
    offered = (n for n in vars(Ranks) if not n.startswith("_"))
    if isinstance(value, type) or not all(callable(getattr(value, n, None)) for n in offered):
        raise PrecisionError(
            f"ranks={value!r}; allowed: halfstep.OneRank(), halfstep.ManyRanks(device), an object "
            "with all methods of halfstep.Ranks, or None for torch.distributed's default group"
        )
    ranks: Any = value
    return cast(Ranks, ranks)


@torch.no_grad()
def check_replicas(named_parameters: Iterable[tuple[str, Tensor]], ranks: Ranks) -> None:
    """Refuse trainable parameters that are neither sharded nor marked, and differ between ranks.

    They are taken for copies: each rank's gradient of them would count as the same one, and the
    norm of hand-written tensor parallel layers would be too small by the root of the number of
    ranks. Values are compared by a hash of 62 bits, in one small collective; parts that hold equal
    values, all zeros for instance, cannot be told from copies. All ranks together, before training.

    Args:
        named_parameters: ``model.named_parameters()``.
        ranks: With :class:`OneRank` nothing is compared.

    Raises:
        PrecisionError: The same on every rank, naming the first that differs; or that the ranks'
            models have different parameters; or that these are no pairs of name and parameter.
    """
    as_ranks(ranks)
    allowed = "model.named_parameters()"
    where = "check_replicas(named_parameters)"
    every = list(require(named_parameters, Iterable, where, allowed))
    for pair in every:
        require(pair, tuple, where, allowed)
    if isinstance(ranks, OneRank):
        return
    plain = [
        (name, p)
        for name, p in every
        if p.requires_grad and not is_sharded(p) and not getattr(p, MARK, False)
    ]
    kinds = repr([(name, str(p.dtype), p.requires_grad) for name, p in every])
    if not all(_equal(ranks, _digest(kinds + repr([name for name, _ in plain])))):
        raise PrecisionError(
            "the ranks' models have different parameters (names, dtypes, marks or frozen ones), so "
            "the norm of all their gradients is not known; make them alike, or pass "
            "ranks=halfstep.OneRank() where each process trains a model of its own"
        )
    sums = [_sum_of_bits(p) for _, p in plain]
    sums = torch.stack(sums).tolist() if sums else []
    numbers = [_digest(f"{s} {tuple(p.shape)}") for s, (_, p) in zip(sums, plain, strict=True)]
    same = _equal(ranks, [n for pair in numbers for n in pair])
    for index, (name, _) in enumerate(plain):
        if not all(same[2 * index : 2 * index + 2]):
            raise PrecisionError(
                f"{name} differs from rank to rank, and nothing says that ranks hold parts of it: "
                f"mark it (parameter.{MARK} = True, and ranks=halfstep.ManyRanks(device, "
                "model_parallel=N) where not all ranks share one copy of the model), broadcast it "
                "from rank 0 if it is a copy, or pass ranks=halfstep.OneRank() where each process "
                "trains a model of its own"
            )


def _sum_of_bits(parameter: Tensor) -> Tensor:
    """The wrapped 64-bit sum of all elements' bits, read as whole numbers."""
    bits = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return bits.detach().contiguous().view(_WORDS[bits.element_size()]).sum(dtype=torch.int64)


def _digest(text: str) -> tuple[int, int]:
    """Two whole numbers below 2^31, which int32 holds with either sign."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    return number >> 33, number & (2**31 - 1)


def _equal(ranks: Ranks, numbers: Sequence[int]) -> list[bool]:
    """Place by place, whether all ranks gave the same: their largest is then their smallest."""
    worst = ranks.worst([*numbers, *(-number for number in numbers)])
    return [a == -b for a, b in zip(worst[: len(numbers)], worst[len(numbers) :], strict=True)]
