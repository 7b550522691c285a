"""What the ranks of a run must agree on before a step: its loss, its norm, and what is broken.

Whether a step is applied depends on the gradients' norm and on the loss. Each rank may hold a part
of the parameters, a share of the batch or both. If it decided from its own values alone, one rank
could step and another skip, after which their weights and loss scales would differ for good. Here
every rank adds its share to the same sum, over all ranks of all mesh axes, in one collective per
step: NaN or inf in one rank's share makes every rank's sum NaN or inf, as MAX does with a flag.

A parameter that is not a DTensor does not show whether ranks hold copies of it or parts. Layers
split by hand set an attribute (:data:`MARK`); :func:`check_replicas` refuses those that do not.

**Source:** Megatron-Core reduces ``found_inf`` with MAX over all model-parallel ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from halfstep.errors import PrecisionError
from halfstep.precision.border import as_device, require
from halfstep.precision.masters.local_part import is_sharded
from halfstep.precision.scaling.gradients import Gradients, NonFinite, Norm, OneRank, Ranks

MARK = "tensor_model_parallel"
"""The attribute, set to True, of a plain parameter that is split over the model-parallel ranks.

**Source:** Megatron-Core, ``core/tensor_parallel/layers.py``, sets it on its split parameters.
"""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ManyRanks(Ranks):
    """Agreement among all ranks of ``torch.distributed``'s default group, which step together."""

    def __init__(
        self,
        device: str | torch.device,
        *,
        loss_share: float | None = None,
        model_parallel: int | None = None,
    ) -> None:
        """Join the default group, which must exist.

        Args:
            device: Where the ranks' sums are computed: a device, or its name, that the group's
                backend supports.
            loss_share: The factor of a rank's loss in the step's loss. None: 1 / number of ranks,
                so the mean over ranks, as DDP and FSDP2 average gradients. 1 where each rank's loss
                is a part of a sum.
            model_parallel: How many ranks share one copy of the model, where layers are split by
                hand: each of them holds a different part of a plain parameter with the attribute
                ``tensor_model_parallel = True``. None: all ranks of the group.
        """
        self._device = as_device(device)
        self._size = dist.get_world_size()
        self._loss_share = 1 / self._size if loss_share is None else loss_share
        self._model_parallel = self._size if model_parallel is None else model_parallel
        if self._model_parallel < 1 or self._size % self._model_parallel:
            raise PrecisionError(
                f"model_parallel={model_parallel} does not divide the {self._size} ranks; give the "
                "number of ranks that share one copy of the model"
            )

    def parts_of(self, parameter: Tensor) -> int:
        """How many ranks hold different parts: by a DTensor's mesh, or a tensor's :data:`MARK`."""
        if isinstance(parameter, DTensor):
            pairs = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            return math.prod(size for size, placement in pairs if placement.is_shard())
        return self._model_parallel if getattr(parameter, MARK, False) else 1

    def measure(self, loss: Tensor, gradients: Gradients, norm: Norm) -> tuple[float, float]:
        """The step's loss and gradient norm, summed over ranks in fp64; bit-equal on every rank.

        If ``n`` of the ``size`` ranks hold different parts of a parameter, each part is in the sum
        ``size / n`` times: hence the factor ``n`` here, and the division by ``size`` at the end.

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
        # one device adds micro-batch losses in fp32: rounding gives two ranks the same value
        value = torch.tensor(value, dtype=torch.float32).item()
        return value, math.sqrt(squares / self._size) if squares >= 0 else math.nan

    def cannot(self) -> None:
        """Tell the other ranks, in :meth:`measure` now or later, that this one cannot step."""
        dist.all_reduce(torch.tensor([0, 0, 1], dtype=torch.float64, device=self._device))

    def worst_(self, marks: Tensor) -> None:
        """Replace ``marks`` by their element-wise maximum over ranks, in place."""
        moved = marks.to(self._device)
        dist.all_reduce(moved, op=dist.ReduceOp.MAX)
        if moved is not marks:
            marks.copy_(moved)

    def of_loss(self, loss: Tensor) -> str:
        """Say on which ranks the loss is not finite; "" if it is on none."""
        every = torch.zeros(self._size, dtype=torch.float64, device=self._device)
        every[dist.get_rank()] = loss
        dist.all_reduce(every)
        broken = [(n, v) for n, v in enumerate(every.tolist()) if not math.isfinite(v)]
        told = ", ".join(f"rank {number}'s loss is {value}" for number, value in broken)
        return told if len(broken) < self._size else f"the loss is {broken[0][1]} on every rank"

    def union(self, found: NonFinite, names: Sequence[str]) -> NonFinite:
        """All ranks' findings."""
        marks = self.worst([int(n in some) for some in (found.nan, found.inf) for n in names])
        nan, inf = marks[: len(names)], marks[len(names) :]
        return NonFinite(
            tuple(name for name, mark in zip(names, nan, strict=True) if mark),
            tuple(name for name, mark in zip(names, inf, strict=True) if mark),
        )


def ranks_of_this_process(device: torch.device, asked: Ranks | None = None) -> Ranks:
    """Who was asked for; or :class:`ManyRanks` where ``torch.distributed`` runs several."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return asked or (ManyRanks(device) if several else OneRank())


def as_ranks(value: object) -> Ranks:
    """Check ``ranks=``."""
    allowed = "halfstep.OneRank(), halfstep.ManyRanks(device), or None for the default group"
    return require(value, Ranks, "ranks=", allowed)


@torch.no_grad()
def check_replicas(named_parameters: Iterable[tuple[str, Tensor]], ranks: Ranks) -> None:
    """Refuse trainable parameters that are neither sharded nor marked, and differ between ranks.

    Unmarked parameters are taken for copies, whose gradient counts once: for hand-written tensor
    parallel layers the norm would be too small, by up to the square root of the number of ranks.
    The sums of their bits are compared; parts with equal values, such as all zeros, cannot be told
    from copies. All ranks must call this together, before training.

    Args:
        named_parameters: ``model.named_parameters()``.
        ranks: With :class:`OneRank` nothing is compared.

    Raises:
        PrecisionError: The same error on every rank: it names the first parameter that differs, or
            says that the ranks' models have different parameters.
    """
    if isinstance(as_ranks(ranks), OneRank):
        return
    every = list(named_parameters)
    plain = [
        (name, p)
        for name, p in every
        if p.requires_grad and not is_sharded(p) and not getattr(p, MARK, False)
    ]
    kinds = repr([(name, str(p.dtype), p.requires_grad) for name, p in every])
    kinds += repr([(name, tuple(p.shape)) for name, p in plain])
    digest = hashlib.blake2b(kinds.encode(), digest_size=8).digest()
    if not all(_alike(ranks, torch.tensor([int.from_bytes(digest, signed=True)]))):
        raise PrecisionError(
            "the ranks' models have different parameters (names, shapes, dtypes, marks or frozen "
            "ones), so the norm of all their gradients is not known; make them alike, or pass "
            "ranks=halfstep.OneRank() where each process trains a model of its own"
        )
    sums = [sum_of_bits(p) for _, p in plain]
    alike = _alike(ranks, torch.stack(sums)) if sums else []
    for (name, _), same in zip(plain, alike, strict=True):
        if not same:
            raise PrecisionError(
                f"{name} differs from rank to rank, and nothing says that ranks hold parts of it: "
                f"mark it (parameter.{MARK} = True, and ranks=halfstep.ManyRanks(device, "
                "model_parallel=N) where not all ranks share one copy of the model), broadcast it "
                "from rank 0 if it is a copy, or pass ranks=halfstep.OneRank() where each process "
                "trains a model of its own"
            )


def sum_of_bits(parameter: Tensor) -> Tensor:
    """The sum, modulo 2^64, of all elements' bit patterns read as integers."""
    bits = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return bits.detach().contiguous().view(WORDS[bits.element_size()]).sum(dtype=torch.int64)


def _alike(ranks: Ranks, numbers: Tensor) -> list[bool]:
    """Element-wise, whether all ranks gave the same int64: whether maximum equals minimum."""
    largest, least = numbers.clone(), -numbers
    ranks.worst_(largest)
    ranks.worst_(least)
    alike: list[bool] = (largest == -least).tolist()
    return alike
