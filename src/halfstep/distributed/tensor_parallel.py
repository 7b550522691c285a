"""Tensor parallelism: every rank of one mesh axis holds, and computes with, a part of each layer.

Parameters become DTensors, which carry their placement on the mesh. Modules compute on the local
parts, so that each rank runs a smaller layer of the same code, and autograd returns gradients as
DTensors placed like their parameters. The plan is data; nothing here knows a particular model.
Styles:

    colwise[:U]       linear: outputs split, in units of U that stay together; the input is whole
    rowwise           linear: inputs split; results are summed, then the bias is added, once
    replicate         whole on every rank
    vocab             embedding split over its rows; one rank has each result, the others add 0

**Dropout.** Ranks must seed torch's default generator alike, as replicated activations must be
dropped alike. All ranks draw equally many random numbers, so they stay in step. A rank's own
heads use the same draws as on the other ranks, so head i of every rank has the same mask: the
dropout probability is right, but masks are not independent between ranks, and differ from those
of one device.

**Source:** Shoeybi et al. 2019, "Megatron-LM", §3.

Shapes: B batch, T positions, C width, F this rank's part of the features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from halfstep.distributed.reducer import DataParallel, gather
from halfstep.distributed.strategy import ParallelPlan
from halfstep.errors import ConfigError
from halfstep.precision.masters.local_part import part_like


def parallelize_(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Reduce the model in place to this rank's part, without communication.

    Names and order of the parameters stay, but the parameters are new objects, so make the
    optimizer and :class:`halfstep.Precision` afterwards.

    Args:
        model: A model with the same, whole parameters on every rank of the axis, in any dtypes.
        plan: Module name to style, for every module that owns parameters.
        mesh: The tensor axis, a one-dim mesh such as ``mesh["tensor"]``.

    Raises:
        ConfigError: If the plan does not fit the model, or the model the number of ranks. Nothing
            is changed then.
    """
    if mesh.ndim != 1:
        raise ConfigError(
            f"the tensor axis must be a mesh of one dim, got {mesh.ndim}: take mesh['tensor']"
        )
    forwards = _forwards(model, plan, mesh)
    _check_tied(forwards)
    parts: dict[int, nn.Parameter] = {}
    for forward in forwards:
        for name, parameter in list(forward.module.named_parameters(recurse=False)):
            if id(parameter) not in parts:
                parts[id(parameter)] = _part(parameter, mesh, forward.placement(name))
            setattr(forward.module, name, parts[id(parameter)])
        forward.install_()


def _forwards(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> list[ParallelForward]:
    """Make the style of each module in the plan; raise ConfigError for a plan that does not fit."""
    modules = dict(model.named_modules(remove_duplicate=False))
    forwards = []
    for name, text in plan.items():
        if name not in modules:
            raise ConfigError(f"the plan names {name!r}, but the model has no such module")
        style, _, argument = text.partition(":")
        if style not in STYLES:
            allowed = ", ".join(STYLES)
            raise ConfigError(f"{name}: unknown style {text!r}; allowed styles: {allowed}")
        module = modules[name]
        sharded = any(isinstance(p, DTensor) for p in module.parameters(recurse=False))
        if sharded or "forward" in module.__dict__:
            raise ConfigError(
                f"{name} is sharded, or its forward replaced, already: make a model parallel once, "
                "and before it is sharded otherwise or given to Precision"
            )
        forwards.append(STYLES[style](name, module, argument, mesh))
    covered = {id(p) for f in forwards for p in f.module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in covered:
            owner = name.rpartition(".")[0]
            raise ConfigError(
                f"the plan leaves the parameter {name} out; add {owner!r} with one of the styles "
                f"{', '.join(STYLES)}"
            )
    return forwards


def _check_tied(forwards: list[ParallelForward]) -> None:
    """Refuse a tied parameter that the plan splits in two different ways."""
    seen: dict[int, tuple[Placement, str]] = {}
    for forward in forwards:
        for name, parameter in forward.module.named_parameters(recurse=False):
            here = (forward.placement(name), f"{forward.name}.{name}")
            first = seen.setdefault(id(parameter), here)
            if first[0] != here[0]:
                raise ConfigError(
                    f"{first[1]} and {here[1]} are one parameter, but the plan splits it in two "
                    f"ways, {first[0]} and {here[0]}: give both modules styles with the same split"
                )


def _part(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Make this rank's part a DTensor in new memory, so that the whole parameter can be freed."""
    whole = parameter.detach()
    part = whole
    if isinstance(placement, Shard):
        part = whole.chunk(mesh.size(), dim=placement.dim)[mesh.get_local_rank()]
    stored = DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),
        mesh,
        [placement],
        run_check=False,
        shape=whole.shape,
        stride=whole.contiguous().stride(),
    )
    return nn.Parameter(stored, requires_grad=parameter.requires_grad)


class TensorParallel(DataParallel):
    """Splits matrices over the ``tensor`` axis, and the batch over the ``data`` axis."""

    _part = staticmethod(part_like)

    def shard_(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Split the model as its plan says.

        Raises:
            ConfigError: If there is no plan, or the model's sizes cannot be split by it.
        """
        if not plan.tensor:
            raise ConfigError(
                f"parallel={self.layout}: {type(model).__name__} has no tensor-parallel plan; use "
                f"data={self.layout.size} or shard={self.layout.size}, or give it "
                "ParallelPlan(tensor={'module name': 'colwise' | 'rowwise' | 'replicate' | "
                "'vocab'}) with a style for every module that owns parameters"
            )
        assert self.mesh is not None
        parallelize_(model, plan.tensor, self.mesh["tensor"])


# The styles of a plan: how each rank computes a module with its part of it.


class ParallelForward:
    """Replaces the forward of a module of which each rank holds a part; each style subclasses it.

    It is set as the instance attribute ``forward``, as a precision policy's regions are: so it is
    copied and pickled with its module, and parameters keep their names.
    """

    def __init__(self, name: str, module: nn.Module, argument: str, mesh: DeviceMesh) -> None:
        self.name = name
        self.module = module
        self.mesh = mesh
        self.read(argument)

    def read(self, argument: str) -> None:
        """Raise ConfigError unless argument, module and number of ranks fit the style."""
        if argument:
            raise ConfigError(f"{self.name}: argument {argument!r} of its style; allowed: none")

    @staticmethod
    def placement(parameter: str) -> Placement:
        """Return the placement on the axis of one of the module's own parameters."""
        return Replicate()

    def install_(self) -> None:
        """Replace the module's forward by this object."""
        self.module.forward = self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward, so that ``inspect`` shows its signature."""
        return MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on this rank's part."""
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's forward with plain tensors for parameters; see :meth:`local`."""
        module = copy.copy(self.module)  # shallow; the module itself never changes
        module.__dict__["_parameters"] = {}
        for name in self.module._parameters:
            module.__dict__[name] = self.local(name)
        return type(self.module).forward(module, *args, **kwargs)

    def local(self, name: str) -> Tensor | None:
        """Return the part of a parameter that this rank computes with; differentiable."""
        parameter = self.module._parameters[name]
        if parameter is None:
            return None
        assert isinstance(parameter, DTensor), f"{self.name}.{name} was replaced"
        part: Tensor = parameter.to_local(grad_placements=parameter.placements)
        return part

    def require_linear(self) -> nn.Linear:
        """Return the module, or raise ConfigError if it is not an ``nn.Linear``."""
        if not isinstance(self.module, nn.Linear):
            raise ConfigError(
                f"{self.name} is a {type(self.module).__name__}; its style splits nn.Linear only: "
                "give it the style replicate"
            )
        return self.module

    def require_shares(self, what: str, size: int, unit: int) -> None:
        """Refuse ``size`` features that ranks cannot share equally in whole units."""
        ranks = self.mesh.size()
        if size % unit:
            raise ConfigError(f"{self.name}: {size} {what} are no multiple of the unit {unit}")
        units = size // unit
        if units % ranks:
            fitting = [str(n) for n in range(1, min(units, 2 * ranks) + 1) if units % n == 0]
            pieces = f" in {units} units of {unit} that stay together" if unit > 1 else ""
            raise ConfigError(
                f"{self.name}: {size} {what}{pieces} cannot be shared equally by {ranks} "
                f"tensor-parallel ranks; allowed for this layer: tensor={', '.join(fitting)}"
            )


class Colwise(ParallelForward):
    """Splits the outputs: each rank computes some of them from the whole input."""

    def read(self, argument: str) -> None:
        """Check the style's argument, the module and the number of ranks."""
        if argument and not (argument.isdecimal() and int(argument) > 0):
            raise ConfigError(
                f"{self.name}: colwise:{argument}; allowed: colwise:U, U outputs >= 1"
            )
        self.require_shares("outputs", self.require_linear().out_features, int(argument or 1))

    @staticmethod
    def placement(parameter: str) -> Placement:
        """How one of the module's own parameters lies on the axis."""
        return Shard(0)

    def __call__(self, x_BTC: Tensor) -> Any:
        """Compute this rank's outputs ``(B, T, F)`` from ``(B, T, C)``."""
        x_BTC = _as_matmul_takes_it(x_BTC)  # so that gradients are sent in half the bytes
        return self.run(copy_to(x_BTC, self.mesh))


class Rowwise(ParallelForward):
    """Splits the inputs: each rank multiplies its own part, and the results are summed."""

    def read(self, argument: str) -> None:
        """Check the style's argument, the module and the number of ranks."""
        super().read(argument)
        self.require_shares("inputs", self.require_linear().in_features, 1)

    @staticmethod
    def placement(parameter: str) -> Placement:
        """How one of the module's own parameters lies on the axis."""
        return Shard(1) if parameter == "weight" else Replicate()

    def local(self, name: str) -> Tensor | None:
        """Return the local part, but no bias: it is added once, after the results are summed."""
        return None if name == "bias" else super().local(name)

    def __call__(self, x_BTF: Tensor) -> Tensor:
        """Compute the outputs, ``(B, T, C)``, from all ranks' ``(B, T, F)``."""
        y_BTC = reduce_from(self.run(x_BTF), self.mesh)
        bias_C = super().local("bias")
        return y_BTC if bias_C is None else y_BTC + bias_C.to(y_BTC.dtype)


class Replicated(ParallelForward):
    """Keeps the module whole on every rank."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what one device would."""
        return self.run(*args, **kwargs)


class VocabularyParallel(ParallelForward):
    """Splits the rows of an embedding, which may be the model's head too.

    If it is, it has the attribute ``vocabulary``, which becomes a :class:`ShardedVocabulary`.
    """

    def read(self, argument: str) -> None:
        """Check the style's argument, the module and the number of ranks."""
        super().read(argument)
        module = self.module
        if not isinstance(module, nn.Embedding) or (
            module.padding_idx is not None or module.max_norm is not None or module.sparse
        ):
            raise ConfigError(
                f"{self.name} is a {type(module).__name__}; the style vocab splits nn.Embedding "
                "without padding_idx, max_norm and sparse only: give it the style replicate"
            )
        try:
            self.vocabulary = ShardedVocabulary(module.num_embeddings, self.mesh)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None

    @staticmethod
    def placement(parameter: str) -> Placement:
        """How one of the module's own parameters lies on the axis."""
        return Shard(0)

    def install_(self) -> None:
        """Replace the module's forward, and its vocabulary if it has one."""
        super().install_()
        if hasattr(self.module, "vocabulary"):
            self.module.__dict__["vocabulary"] = self.vocabulary

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Look up rows of the whole table, ``(B, T, C)``, exactly."""
        row_BT, elsewhere_BT = self.vocabulary.index(tokens_BT)
        # -0.0, not 0.0: adding it keeps every bit of the other summand, even the sign of a zero.
        mine_BTC = self.run(row_BT).masked_fill(elsewhere_BT.unsqueeze(-1), -0.0)
        return reduce_from(mine_BTC, self.mesh)


STYLES: Mapping[str, type[ParallelForward]] = {
    "colwise": Colwise,
    "rowwise": Rowwise,
    "replicate": Replicated,
    "vocab": VocabularyParallel,
}
"""Name of each style in a plan to its class."""


def _as_matmul_takes_it(x: Tensor) -> Tensor:
    """Cast a linear layer's input as autocast would; without autocast, return it unchanged."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if on and x.dtype != torch.float64 else x


# A vocabulary whose rows are split over the ranks of the tensor axis: lookup, logits and loss.
#
# Every rank holds the hidden states of all tokens and its own rows of the table. For the loss,
# ranks exchange scalars per token, never logits: the largest logit, the sum of exponentials and the
# target's log-probability.
#
# Shapes: N tokens, R tokens of one chunk, D model width, V vocabulary (on this rank, its part).


class ShardedVocabulary:
    """A table of ``size`` rows, of which this rank has ``[start, end)``, as ``torch.chunk`` cuts.

    It takes the place of the models' ``Vocabulary`` and has the same methods.
    """

    def __init__(self, size: int, mesh: DeviceMesh) -> None:
        """Determine this rank's rows.

        Args:
            size: Number of rows, V, of the whole table.
            mesh: The tensor axis.

        Raises:
            ConfigError: If some rank would have no row.
        """
        self.size = size
        self.mesh = mesh
        self.largest_part = -(-size // mesh.size())
        filled = -(-size // self.largest_part)
        if filled < mesh.size():
            raise ConfigError(
                f"a vocabulary of {size} rows makes {filled} parts of up to {self.largest_part}, "
                f"which leaves {mesh.size() - filled} of {mesh.size()} tensor-parallel ranks "
                f"without any: take tensor={filled}, or a larger vocabulary"
            )
        self.start = mesh.get_local_rank() * self.largest_part
        self.end = min(self.start + self.largest_part, size)

    def index(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Translate token ids to this rank's row numbers.

        Args:
            tokens: Ids, int64, any shape.

        Returns:
            The row, 0 for a token of another rank; and whether it is of another rank. An id outside
            of the whole vocabulary stays out of range on every rank, so that all ranks fail as one
            device does.
        """
        elsewhere = ((tokens >= 0) & (tokens < self.start)) | (
            (tokens >= self.end) & (tokens < self.size)
        )
        return (tokens - self.start).masked_fill(elsewhere, 0), elsewhere

    def local(self, weight_VD: Tensor) -> Tensor:
        """Return this rank's rows of a table that is stored as DTensor."""
        assert isinstance(weight_VD, DTensor), "a sharded vocabulary has a sharded table"
        rows_VD: Tensor = weight_VD.to_local(grad_placements=weight_VD.placements)
        return rows_VD

    def share(self, x: Tensor) -> Tensor:
        """Return hidden states for every rank's head; backward sums their gradients over ranks."""
        return copy_to(x, self.mesh)

    def gather(self, logits_V: Tensor) -> Tensor:
        """Gather every rank's logits to those of the whole vocabulary, ``(..., V)``."""
        return gather_replicated(logits_V, self.mesh, -1, self.size)

    def columns(self, vocab: int) -> int:
        """Return the most columns that any rank's logits have."""
        return self.largest_part

    def largest(self, value: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks."""
        return max_over_ranks(value, self.mesh)

    def log_softmax(
        self, logits_RV: Tensor, target_R1: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities of this rank's tokens, and of the targets on any rank.

        Args:
            logits_RV: ``(R, V)``, this rank's logits; may be overwritten.
            target_R1: ``(R, 1)`` int64, ids in the whole vocabulary.
            dtype: Dtype to compute in.

        Returns:
            ``(R, V)`` and ``(R, 1)`` in ``dtype``, in nats; the second is the same on all ranks.
            A NaN in any rank's logits makes the row NaN on all, through the sum of exponentials.
        """
        z_RV = logits_RV.to(dtype)
        z_RV -= max_over_ranks(z_RV.amax(dim=1, keepdim=True), self.mesh)
        row_R1, elsewhere_R1 = self.index(target_R1)
        z_target_R1 = z_RV.gather(1, row_R1).masked_fill(elsewhere_R1, 0)
        sums_R2 = torch.cat((z_RV.exp().sum(dim=1, keepdim=True), z_target_R1), dim=1)
        sum_R1, z_target_R1 = sum_over_ranks(sums_R2, self.mesh).tensor_split(2, dim=1)
        log_sum_R1 = sum_R1.log()
        return z_RV.sub_(log_sum_R1), z_target_R1 - log_sum_R1

    def put_(self, error_RV: Tensor, target_R1: Tensor, value_R1: Tensor) -> None:
        """Set the targets' columns where this rank has them; other rows stay as they are."""
        row_R1, elsewhere_R1 = self.index(target_R1)
        kept_R1 = torch.where(elsewhere_R1, error_RV.gather(1, row_R1), value_R1)
        error_RV.scatter_(1, row_R1, kept_R1)


# Collectives at the borders of tensor-parallel regions, each with its transpose in backward.
#
# Outside of a region every rank of the tensor axis holds the same activations; inside, each rank
# holds its own part of the features. These functions cross a border:
#
#     function            forward                     backward
#     copy_to             identity                    sum over ranks
#     reduce_from         sum over ranks              identity
#     gather_replicated   gather the parts of a dim   keep own part
#
# The first two enter and leave regions. The last one feeds work that every rank computes alike,
# whose gradient is therefore complete on every rank and must not be summed.
#
# Sums of 16-bit tensors are sent in 16 bits, added in fp32 in the order of the ranks and rounded
# once. Every sum has the same bits on all ranks, so that replicated parameters never diverge.
#
# Shapes: R is the dim over ranks.

Crossing: TypeAlias = Callable[[Tensor, DeviceMesh], Tensor]
"""What a border does to a tensor, in forward or in backward."""


def copy_to(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return ``x`` itself; backward sums the gradients that the ranks compute for it.

    Args:
        x: Any shape, the same on all ranks.
        mesh: The tensor axis.
    """
    return _cross(x, mesh, _same, sum_over_ranks)


def reduce_from(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum all ranks' ``x`` in its dtype, with the same bits on all ranks."""
    return _cross(x, mesh, sum_over_ranks, _same)


def gather_replicated(x: Tensor, mesh: DeviceMesh, dim: int, size: int | None = None) -> Tensor:
    """Gather all parts of ``dim``, for work that every rank does alike.

    Args:
        x: This rank's part.
        mesh: The tensor axis.
        dim: The dim of which ranks hold parts, as ``torch.chunk`` makes them.
        size: Size of the whole dim; None if all parts are as long as this one.
    """
    dim %= x.ndim
    whole = x.shape[dim] * mesh.size() if size is None else size
    missing = -(-whole // mesh.size()) - x.shape[dim]

    def there(x: Tensor, mesh: DeviceMesh) -> Tensor:
        if missing:  # collectives need equal parts
            x = torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing])
        return _gather(x, mesh, dim).narrow(dim, 0, whole)

    def back(grad: Tensor, mesh: DeviceMesh) -> Tensor:
        return grad.chunk(mesh.size(), dim=dim)[mesh.get_local_rank()].contiguous()

    return _cross(x, mesh, there, back)


class _Border(torch.autograd.Function):
    """Applies one function of a tensor and the mesh in forward, and its transpose in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, there: Crossing, back: Crossing) -> Tensor:
        ctx.mesh, ctx.back = mesh, back
        return there(x, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.mesh), None, None, None


def _cross(x: Tensor, mesh: DeviceMesh, there: Crossing, back: Crossing) -> Tensor:
    return cast(Tensor, _Border.apply(x, mesh, there, back))  # type: ignore[no-untyped-call]


def _same(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return x.view_as(x)


def sum_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum all ranks' ``x`` without gradient; 16-bit elements are added in fp32.

    Returns:
        A new tensor of the shape and dtype of ``x``.
    """
    if x.element_size() >= 4:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=mesh.get_group())
        return total
    # Reduce-scatter and all-gather send what a ring all-reduce does, but never round partial sums.
    flat = x.reshape(-1)
    padded = torch.nn.functional.pad(flat, [0, -len(flat) % mesh.size()])
    return _gather(_sum_own_part(padded, mesh, 0), mesh, 0)[: len(flat)].view(x.shape)


def max_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the elementwise maximum over the ranks, without gradient; NaN may be lost."""
    largest = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return largest


def _gather(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Concatenate all ranks' ``x``, of equal shape, along ``dim`` in the order of the ranks."""
    parts_R = x.new_empty((mesh.size(), *x.shape))
    gather(parts_R.view(-1), x.reshape(-1), mesh.get_group()).wait()
    return parts_R.movedim(0, dim).flatten(dim, dim + 1)


def _sum_own_part(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Sum this rank's part of ``dim`` in rank order, in fp32 or wider, rounded once.

    The sum starts at the first rank's values, not at 0, because 0 + -0.0 would lose the sign.
    """
    mine_R = torch.stack(x.chunk(mesh.size(), dim))
    theirs_R = torch.empty_like(mine_R)
    dist.all_to_all_single(theirs_R, mine_R, group=mesh.get_group())
    first, *rest = theirs_R.unbind()
    total = first.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for part in rest:
        total += part
    return total.to(x.dtype)
