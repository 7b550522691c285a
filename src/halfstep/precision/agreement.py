"""What the ranks of a run must agree on before a step: its loss, its norm, and what is broken.

Whether a step is applied depends on the gradients' norm and on the loss. Each rank may hold a part
of the parameters, a share of the batch or both. If it decided from its own values alone, one rank
could step and another skip, after which their weights and loss scales would differ for good. Here
every rank adds its share to the same sum, in one collective per step: NaN or inf in one rank's
share makes every rank's sum NaN or inf, as MAX does with a flag.

In the same collective each rank tells, in a row of its own, what ranks with copies of the same part
must have in common: the number of the step, the counts, the norm of these gradients, and the bits
of these weights. So gradients that nobody has reduced, a step that one rank left out and ranks that
have parted ways are found in the first step, and by the number of the rank.

A parameter that is not a DTensor does not show whether ranks hold copies of it or parts. Layers
split by hand set an attribute (:data:`MARK`). What has none and differs is refused: taken for
copies, parts would make the norm too small, by up to the square root of their number. Parts with
equal values, such as all zeros, cannot be told from copies.

**Source:** Megatron-Core reduces ``found_inf`` with MAX over all model-parallel ranks.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import PartedError, PeerError, PrecisionError
from halfstep.precision.border import as_device, require
from halfstep.precision.masters.local_part import fsdp_modules, local_part
from halfstep.precision.scaling.gradients import Gradients, NonFinite, Norm, OneRank, Ranks, Share
from halfstep.precision.words import heard, listen, lost, say

AnyRanks = Ranks | dist.ProcessGroup | DeviceMesh
"""What ``ranks=`` takes: those of a group, of a mesh, or as an object says."""
MARK = "tensor_model_parallel"
"""The attribute, set to True, of a plain parameter that is split over the model-parallel ranks.

**Source:** Megatron-Core, ``core/tensor_parallel/layers.py``, sets it on its split parameters.
"""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TAKES, _LEAVES_OUT, _CANNOT = range(3)
_PRIME = 2**52 - 47  # sums of bits modulo a prime below 2^53: fp64 holds them, no bit is lost
_ROUNDING = 1e-5  # of a norm, which ranks with other kernels or threads add up otherwise
_LOOKED_AT = 64  # weights whose bits are compared in one step, at most
_PARTED = (
    ": ranks that hold copies of one model have parted ways, and no later step can mend it; go on "
    "from the last checkpoint (--resume last-good), and look for memory or network faults, or "
    "for code that skips steps or changes weights on some ranks only"
)
_UNREDUCED = (
    ": nothing has reduced them. Wrap the model in DistributedDataParallel, leave no_sync() for a "
    "step's last micro-batch, or pass ranks=halfstep.OneRank() where each process trains a model "
    "of its own"
)


class _Column(NamedTuple):
    """What ranks that hold the same part have in common in a step: a column of their rows."""

    what: str
    parts: Sequence[int] = ()  # which one each rank holds; empty: all the same
    near: float = 0.0  # how far apart values may be, relative
    remedy: str = _PARTED


_FIXED = (
    _Column("taking a step, which discard() leaves out on all ranks or on none"),
    *map(_Column, ("the step", "the applied steps", "the loss scale")),
)
"""The first columns, of every model; then come bits of weights, and norms of gradients."""


class ManyRanks(Ranks):
    """Agreement among all ranks of a group, which step together."""

    _columns: Sequence[_Column] = _FIXED

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        loss_share: float | None = None,
        model_parallel: int | None = None,
    ) -> None:
        """Join the group; all its ranks call this together, and no other rank need.

        Args:
            device: Where sums are computed: a device, or its name, that the group's backend
                supports. None: the CPU if it does support that, else the accelerator.
            group: The ranks that step together: a process group, or a mesh, all of whose ranks are
                meant. None: the default group, which must exist.
            loss_share: The factor of a rank's loss in the step's loss. None: 1 / number of ranks,
                so the mean, as DDP and FSDP2 average gradients. 1 where losses are parts of a sum.
            model_parallel: How many ranks share one copy of the model, where layers are split by
                hand: each of them holds a different part of a plain parameter with the attribute
                ``tensor_model_parallel = True``. None: all ranks of the group.

        Raises:
            PrecisionError: If ``model_parallel`` does not divide the number of ranks, or this
                process is not in the group.
        """
        named = None if device is None else as_device(device)
        self.members = _members(group)
        if dist.get_rank() not in self.members:
            raise PrecisionError(
                f"ranks= is a group of ranks {self.members}, and this is rank {dist.get_rank()}; "
                "only the group's own ranks make a Precision or a GradScaler with it"
            )
        host = "cpu:" in dist.get_backend_config()
        own = None if host else torch.accelerator.current_accelerator()
        self._device = named or own or torch.device("cpu")
        self._group = _line(self.members, self._device, group)
        self._size, self._rank = len(self.members), self.members.index(dist.get_rank())
        self._loss_share = 1 / self._size if loss_share is None else loss_share
        self._model_parallel = self._size if model_parallel is None else model_parallel
        if self._model_parallel < 1 or self._size % self._model_parallel:
            raise PrecisionError(
                f"model_parallel={model_parallel} does not divide the {self._size} ranks; give the "
                "number of ranks that share one copy of the model"
            )
        self._at = 0, 0, 0.0
        # by bound(): a model's trained parameters, how each lies over the ranks, and for those
        # split alike which part each rank has, where some have the same
        self._named: list[tuple[str, Tensor]] = []
        self._shares: dict[Tensor, Share] = {}
        self._parts: dict[str, list[int]] = {}

    def bound(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Self:
        """These ranks for one model, whose copies are compared; all of them call it together.

        Raises:
            PrecisionError: The same error on every rank: it names the first trainable parameter
                that differs, is neither sharded nor marked, or says that the models differ.
        """
        one, every = copy.copy(self), [*named_parameters]
        say("")
        listen()
        one._shares = {p: self.share_of(p) for _, p in every}
        for name, p in every:
            ranks = _members(p.device_mesh) if isinstance(p, DTensor) else self.members
            if not {*ranks} <= {*self.members}:
                raise PrecisionError(
                    f"{name} lies over ranks {ranks}, and ranks= has only {self.members}; pass "
                    "that parameter's device_mesh as ranks=, or a mesh or group with all of them"
                )
        one._named = [(name, p) for name, p in every if p.requires_grad]
        shares = [one._shares[p] for _, p in one._named]
        kinds = repr([(name, str(p.dtype), p.requires_grad) for name, p in every])
        kinds += repr(
            [s.parts > 1 or p.shape for s, (_, p) in zip(shares, one._named, strict=True)]
        )
        held = {share.split: share.part for share in shares}
        digest = hashlib.blake2b((kinds + repr([*held])).encode(), digest_size=8).digest()
        if len({*self._gathered(torch.tensor(int.from_bytes(digest, signed=True))).tolist()}) > 1:
            raise PrecisionError(
                "the ranks' models have different parameters (names, shapes, dtypes, marks, meshes "
                "or frozen ones), so the norm of all their gradients is not known; make them alike,"
                " or pass ranks=halfstep.OneRank() where each process trains a model of its own"
            )
        table = self._gathered(torch.tensor([*held.values()], dtype=torch.int64)).T.tolist()
        parts = zip(held, table, strict=True)
        one._parts = {split: each for split, each in parts if len({*each}) < self._size}
        what, several = "the norm of gradients of copied weights", [*one._parts.values()]
        norms = [_Column(what, each, _ROUNDING, _UNREDUCED) for each in several]
        one._columns = [*_FIXED, *(_Column("a weight", each) for each in several), *norms]
        if found := one._differing(one._named):
            raise PrecisionError(
                f"{found[0]} differs from rank to rank, and nothing says that ranks hold parts of "
                f"it: mark it (parameter.{MARK} = True, and ranks=halfstep.ManyRanks(device, "
                "model_parallel=N) where not all ranks share one copy of the model), broadcast it "
                "from rank 0 if it is a copy, or pass ranks=halfstep.OneRank() where each process "
                "trains a model of its own"
            )
        return one

    def share_of(self, parameter: Tensor) -> Share:
        """Which of how many parts this rank holds: by a DTensor's mesh, or a tensor's :data:`MARK`.

        A plain part is taken for one of its own. Axes that hold copies are left out of the count:
        FSDP2 over tensor parallelism splits by a placement that says of itself that it is no shard.
        """
        if (known := self._shares.get(parameter)) is not None:
            return known
        if not isinstance(parameter, DTensor):
            marked = getattr(parameter, MARK, False) and self._model_parallel > 1
            return Share(self._model_parallel, self._rank, MARK) if marked else Share()
        mesh, parts, part, axes = parameter.device_mesh, 1, 0, []
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                parts *= mesh.size(axis)
                part = part * mesh.size(axis) + mesh.get_local_rank(axis)
                axes.append(axis)
        order = (mesh.mesh - mesh.mesh.min()).tolist()  # alike in meshes side by side
        return Share(parts, part, f"{axes} of {order}") if parts > 1 else Share()

    def at(self, step: int, applied: int, scale: float) -> None:
        """Where this rank is: steps begun and applied, and its loss scale."""
        self._at = step, applied, scale

    def measure(self, loss: Tensor, gradients: Gradients, norm: Norm) -> tuple[float, float]:
        """The step's loss and gradient norm, summed over ranks in fp64; bit-equal on every rank.

        If ``n`` of the ``size`` ranks hold different parts of a parameter, each part is in the sum
        ``size / n`` times: hence the factor ``n`` here, and the division by ``size`` at the end.

        Raises:
            PrecisionError: On every rank, if one of them cannot step, is at another step, or
                differs from the ranks that hold the same part; it is named.
            PeerError: If another rank is gone, or does not come.
        """
        sums, mine = self._row(_TAKES)
        sums[0] = loss.double() * self._loss_share
        start, splits = self._at[0] * _LOOKED_AT % max(1, len(self._named)), [*self._parts]
        # the weights whose turn it is
        window = [*self._named[start:], *self._named[:start]][:_LOOKED_AT]
        for share, some in gradients.items():
            if some:
                length = norm(some).double().to(self._device)
                sums[1] += length.square() * share.parts
                if share.split in self._parts:
                    mine[len(_FIXED) + len(splits) + splits.index(share.split)] = length
        for number, split in enumerate(splits, len(_FIXED)):
            bits = [sum_of_bits(p) for _, p in window if self._shares[p].split == split]
            if bits:
                mine[number] = torch.stack(bits).sum() % _PRIME
        value, squares = self._meet(sums, window)
        # one device adds micro-batch losses in fp32: rounding gives two ranks the same value
        value = torch.tensor(value, dtype=torch.float32).item()
        return value, math.sqrt(squares / self._size) if squares >= 0 else math.nan

    def cannot(self) -> None:
        """Tell the other ranks, in :meth:`measure` now or later, that this one cannot step."""
        with suppress(PeerError):  # this rank's own error is raised
            self._sum(self._row(_CANNOT)[0])

    def leave_out(self) -> None:
        """Leave a step out, which all ranks do or none.

        Raises:
            PrecisionError: On every rank, if another one takes the step.
        """
        self._meet(self._row(_LEAVES_OUT)[0], [])

    def agree(self) -> None:
        """Compare all weights now, where a step looks at some; all ranks call it together.

        Raises:
            PrecisionError: On every rank, with the weight and the ranks that differ.
        """
        if found := self._differing(self._named):
            raise PartedError(f"{found[1]} in {found[0]} after step {self._at[0]}{_PARTED}")

    def _row(self, does: int) -> tuple[Tensor, Tensor]:
        """The sums of a step, all zero, and this rank's own row of them, which is a view."""
        size, columns = self._size, len(self._columns)
        sums = torch.zeros(2 + size * columns, dtype=torch.float64, device=self._device)
        mine = sums[2:].view(size, columns)[self._rank]
        mine[: len(_FIXED)] = torch.tensor([does, *self._at], dtype=torch.float64)
        return sums, mine

    def _sum(self, table: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        try:
            dist.all_reduce(table, op=op, group=self._group)
        except RuntimeError as error:
            lost(error, self.members, f"takes step {self._at[0]}")
            raise

    def _gathered(self, row: Tensor) -> Tensor:
        """All ranks' tensors of this shape, by rank, on the host."""
        rows = torch.zeros(self._size, *row.shape, dtype=row.dtype, device=self._device)
        rows[self._rank] = row
        self._sum(rows)
        return rows.cpu()

    def _meet(self, sums: Tensor, window: list[tuple[str, Tensor]]) -> tuple[float, float]:
        """Add up all ranks' sums; the first two, if the rows of ranks with copies are alike."""
        self._sum(sums)
        sums = sums.cpu()
        rows = sums[2:].view(self._size, -1)
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            self._require_alike(rows.T.tolist(), window)
        value, squares = sums[:2].tolist()
        return value, squares

    def _require_alike(self, columns: list[list[float]], window: list[tuple[str, Tensor]]) -> None:
        """Raise, on every rank, what the rows tell."""
        unable = [self.members[n] for n, does in enumerate(columns[0]) if does == _CANNOT]
        if unable:
            raise PrecisionError(
                f"{len(unable)} of {self._size} ranks could not take this step, so none does: "
                f"{heard(unable, 1.0)}"
            )
        for (what, parts, near, remedy), values in zip(self._columns, columns, strict=True):
            who, shown = self._apart(values, parts, near)
            if who and what == "a weight":
                what, who = self._differing(window) or ("no weight any more", who)
                what, shown = f"{what} at step {self._at[0]}", ""
            if who:
                kind = PartedError if remedy == _PARTED else PrecisionError
                raise kind(f"{who} in {what}{shown}{remedy}")

    def _differing(self, named: list[tuple[str, Tensor]]) -> tuple[str, str] | None:
        """The first of these weights that ranks with the same part do not hold alike, and who."""
        some = [(name, p) for name, p in named if self._shares[p].split in self._parts]
        if some:
            table = self._gathered(torch.stack([sum_of_bits(p) for _, p in some])).T.tolist()
            for (name, p), values in zip(some, table, strict=True):
                who, _ = self._apart(values, self._parts[self._shares[p].split])
                if who:
                    return name, who
        return None

    def _apart(
        self, values: Sequence[float], parts: Sequence[int], near: float = 0.0
    ) -> tuple[str, str]:
        """Which rank's finite value is not that of most with the same part, and both; or ""."""
        parts = parts or [0] * self._size
        for part in {*parts}:
            rows = zip(self.members, values, parts, strict=True)
            held = {rank: v for rank, v, its in rows if its == part and math.isfinite(v)}
            for known, _ in Counter(held.values()).most_common(1):
                other = next(rank for rank, value in held.items() if value == known)
                for rank, value in held.items():
                    if abs(value - known) > near * abs(known):
                        shown = f" ({value:g} and {known:g})"
                        return f"rank {rank} differs from rank {other}", shown
        return "", ""

    def worst_(self, marks: Tensor) -> None:
        """Replace ``marks`` by their element-wise maximum over ranks, in place."""
        moved = marks.to(self._device)
        self._sum(moved, dist.ReduceOp.MAX)
        if moved is not marks:
            marks.copy_(moved)

    def of_loss(self, loss: Tensor) -> str:
        """Say on which ranks the loss is not finite; "" if it is on none."""
        every = self._gathered(loss.detach().double().reshape(())).tolist()
        broken = [(n, v) for n, v in zip(self.members, every, strict=True) if not math.isfinite(v)]
        told = ", ".join(f"rank {number}'s loss is {value}" for number, value in broken)
        return told if len(broken) < self._size else f"the loss is {broken[0][1]} on every rank"

    def union(self, found: NonFinite, names: Sequence[str]) -> NonFinite:
        """All ranks' findings."""
        marks = self.worst([int(n in some) for some in (found.nan, found.inf) for n in names])
        nan, inf = marks[: len(names)], marks[len(names) :]
        return NonFinite(tuple(compress(names, nan)), tuple(compress(names, inf)))


def _members(group: dist.ProcessGroup | DeviceMesh | None) -> list[int]:
    """The global ranks of a group or of a mesh, in rising order; None: all."""
    if isinstance(group, DeviceMesh):
        return sorted(group.mesh.flatten().tolist())
    return sorted(dist.get_process_group_ranks(group))


_OWN: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


def _line(members: Sequence[int], device: torch.device, group: Any) -> Any:
    """The group for these ranks' sums: on a CPU one of its own, where gloo serves.

    In DDP's group a rank that left a step out would answer a sum with a bucket of gradients, and
    gloo ends both processes over two tensors of unlike size. In a group of its own such a sum ends
    at the group's timeout, with an error that can be caught.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group() if group.ndim == 1 else None
    base: Any = group or dist.group.WORLD
    own = device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(base)
    if not own and len(members) == dist.get_world_size(base):
        return base
    made = _OWN.setdefault(dist.group.WORLD, {})
    timeout = base._get_backend(device).options._timeout
    key = (*members, timeout, own)
    if key not in made:
        backend, c10d = "gloo" if own else None, dist.distributed_c10d
        # torch's name counts this rank's groups; ranks in more than others would wait for ever.
        theirs, name = c10d._hash_ranks_to_str, hashlib.sha256(repr(key).encode()).hexdigest()
        c10d._hash_ranks_to_str = lambda ranks: name
        try:
            made[key] = dist.new_group(members, timeout, backend, use_local_synchronization=True)
        finally:
            c10d._hash_ranks_to_str = theirs
    return made[key]


def ranks_of_this_process(
    device: str | torch.device,
    asked: AnyRanks | None = None,
    held_by: nn.Module | Iterable[Tensor] = (),
) -> Ranks:
    """Who was asked for; or :class:`ManyRanks` where ``torch.distributed`` runs several.

    These are the ranks of the wrapper that a model has, DDP's group or the mesh of its parameters,
    where that holds fewer than all.
    """
    if isinstance(asked, dist.ProcessGroup | DeviceMesh):
        return ManyRanks(device, group=asked)
    if asked is not None:
        allowed = (
            "a process group or a device mesh that this rank is in, halfstep.ManyRanks(...), "
            "halfstep.OneRank(), or None for the ranks of the model's wrapper"
        )
        return require(asked, Ranks, "ranks=", allowed)
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return OneRank()
    found: set[Any] = set()
    if isinstance(held_by, nn.Module):
        wrappers = [m for m in held_by.modules() if isinstance(m, DistributedDataParallel)]
        found = {wrapper.process_group for wrapper in wrappers}
        # tensor parallelism alone does not say who sums the gradients of its copies: all may
        held_by = held_by.parameters() if found or any(fsdp_modules(held_by)) else ()
    found |= {p.device_mesh for p in held_by if isinstance(p, DTensor)}
    spans = {(*_members(group),): group for group in found}
    widest = max(spans, key=len, default=())
    crossing = any({*span} - {*widest} for span in spans)  # such as DDP around tensor parallelism
    return ManyRanks(device, group=None if crossing else spans.get(widest))


def sum_of_bits(parameter: Tensor) -> Tensor:
    """The sum, modulo 2^64, of all bit patterns of this rank's part, read as integers."""
    bits = local_part(parameter)
    bits = torch.view_as_real(bits) if bits.is_complex() else bits
    return bits.detach().contiguous().view(WORDS[bits.element_size()]).sum(dtype=torch.int64)
