"""Tensor parallelism: every rank of one mesh axis holds, and computes with, a part of each layer.

Parameters become DTensors, which carry their placement on the mesh. Modules compute on the local
parts, so that each rank runs a smaller layer of the same code, and autograd returns gradients as
DTensors placed like their parameters. The plan is data; nothing here knows a particular model.
Styles:

    colwise[:U]       linear: outputs split, in units of U that stay together; the input is whole
    rowwise           linear: inputs split; results are summed, then the bias is added, once
    replicate         whole on every rank, as is every module that the plan does not name

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
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from halfstep.distributed.strategy import ParallelPlan, Strategy
from halfstep.errors import ConfigError
from halfstep.precision.masters.reduction import RoundedSum, start_sum
from halfstep.precision.step import Precision


def parallelize_(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Reduce the model in place to this rank's part, without communication.

    Names and order of the parameters stay, but the parameters are new objects, so make the
    optimizer and :class:`halfstep.Precision` afterwards.

    Args:
        model: A model with the same, whole parameters on every rank of the axis, in any dtypes.
        plan: Module name to style; every other module stays whole on every rank.
        mesh: The tensor axis, a one-dim mesh such as ``mesh["tensor"]``.

    Raises:
        ConfigError: If the plan does not fit the model, or the model the number of ranks. Nothing
            is changed then.
    """
    forwards = _forwards(model, plan, mesh)
    _check_tied(forwards)
    parts: dict[int, nn.Parameter] = {}
    for forward in forwards:
        for name, parameter in list(forward.module.named_parameters(recurse=False)):
            if id(parameter) not in parts:
                parts[id(parameter)] = _part(parameter, mesh, forward.placement(name))
            setattr(forward.module, name, parts[id(parameter)])
        forward.module.forward = forward


def _forwards(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> list[ParallelForward]:
    """Make the style of each module in the plan; raise ConfigError for a plan that does not fit."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in plan:
        if name not in modules:
            raise ConfigError(f"the plan names {name!r}, but the model has no such module")
    owners = {n: "replicate" for n, m in modules.items() if [*m.parameters(recurse=False)]}
    forwards = []
    for name, text in (owners | dict(plan)).items():
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


class TensorParallel(Strategy):
    """Splits matrices over the ``tensor`` axis, and the batch over the ``data`` axis."""

    def shard_(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Split the model as its plan says.

        Raises:
            ConfigError: If there is no plan, or the model's sizes cannot be split by it.
        """
        if not plan.tensor:
            raise ConfigError(
                f"parallel={self.layout}: {type(model).__name__} has no tensor-parallel plan; use "
                f"data={self.layout.size} or shard={self.layout.size}, or give it "
                "ParallelPlan(tensor={'module name': 'colwise' or 'rowwise'})"
            )
        assert self.mesh is not None
        parallelize_(model, plan.tensor, self.mesh["tensor"])

    def attach_(self, precision: Precision) -> None:
        """Remember the Precision whose gradients are summed."""
        self._precision = precision

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the gradients of this rank's parts over the ``data`` axis, in ``reduce_dtype``.

        DDP takes no DTensors, so this is one sum when the backward has ended. A gradient that no
        rank has stays None.
        """
        if self.layout.data == 1:
            return
        assert self.mesh is not None
        masters, low = self._precision.masters, self.policy.reduce_dtype == torch.float16
        scale = self._precision.loss_scale.value if low else 1.0
        targets = [p for p in self._precision.named_parameters().values() if p.requires_grad]
        found = masters.gradients(targets)
        have = [float(target in found) for target in targets]
        parts = [found.get(p, torch.zeros_like(p)).reshape(-1).float() for p in targets]
        flat = torch.cat([*parts, torch.tensor(have, device=self.device)])
        start_sum(flat, self.mesh.get_group("data"), self.policy.reduce_dtype, scale)()
        sizes = [*map(Tensor.numel, targets), len(targets)]
        *sums, anyone_has = torch.split(flat, sizes)
        masters.replace(
            {p: total.view(p.shape) for p, total, has
             in zip(targets, sums, anyone_has.tolist(), strict=True) if has}
        )  # fmt: skip


# The styles of a plan: how each rank computes a module with its part of it.


class ParallelForward:
    """Replaces the forward of a module; this is the style replicate, the others subclass it.

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the module's parts; this base class has it whole on every rank."""
        return self.run(*args, **kwargs)

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
        return self.run(_CopyTo.apply(x_BTC, self.mesh))  # type: ignore[no-untyped-call]


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
        y_BTC: Tensor = _ReduceFrom.apply(self.run(x_BTF), self.mesh)  # type: ignore[no-untyped-call]
        bias_C = super().local("bias")
        return y_BTC if bias_C is None else y_BTC + bias_C.to(y_BTC.dtype)


STYLES: Mapping[str, type[ParallelForward]] = {
    "colwise": Colwise,
    "rowwise": Rowwise,
    "replicate": ParallelForward,
}
"""Name of each style in a plan to its class."""


def _as_matmul_takes_it(x: Tensor) -> Tensor:
    """Cast a linear layer's input as autocast would; without autocast, return it unchanged."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if on and x.dtype != torch.float64 else x


# Collectives at the borders of tensor-parallel regions, each with its transpose in backward.
#
# Outside of a region every rank of the tensor axis holds the same activations; inside, each rank
# holds its own part of the features. These functions cross a border:
#
#                    forward             backward
#     _CopyTo        identity            sum over ranks
#     _ReduceFrom    sum over ranks      identity
#
# Sums of 16-bit tensors are sent in 16 bits, added in fp32 in the order of the ranks and rounded
# once. Every sum has the same bits on all ranks, so that replicated parameters never diverge.


class _CopyTo(torch.autograd.Function):
    """The tensor itself, equal on all ranks; backward sums the gradients that they compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over_ranks(grad, ctx.mesh), None


class _ReduceFrom(torch.autograd.Function):
    """The sum of all ranks' tensors in their dtype, with the same bits on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return sum_over_ranks(x, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.view_as(grad), None


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
    return RoundedSum(x.reshape(-1), mesh.get_group()).result().view(x.shape)
