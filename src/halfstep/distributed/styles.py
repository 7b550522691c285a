"""The styles of a tensor-parallel plan: how each rank computes a module with its part of it.

:mod:`halfstep.distributed.tensor_parallel` describes each style and applies a plan.

Shapes: B batch, T positions, C width, F this rank's part of the features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from halfstep.distributed.regions import (
    copy_to,
    gather_replicated,
    max_over_ranks,
    reduce_from,
    sum_over_ranks,
)
from halfstep.errors import ConfigError


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
#
# **Source:** Shoeybi et al. 2019, "Megatron-LM", §3.


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
