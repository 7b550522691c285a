"""Tensor parallelism: splits a model's layers by its plan, so that ranks share matrix products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from halfstep.distributed.reducer import DataParallel
from halfstep.distributed.strategy import ParallelPlan
from halfstep.distributed.styles import STYLES, ParallelForward
from halfstep.errors import ConfigError
from halfstep.precision.masters.local_part import part_like

# Tensor parallelism: every rank of one mesh axis holds, and computes with, a part of each layer.
#
# Parameters become DTensors, which carry their placement on the mesh. Modules compute on the local
# parts, so that each rank runs a smaller layer of the same code, and autograd returns gradients as
# DTensors placed like their parameters. The plan is data; nothing here knows a particular model.
# Styles:
#
#     colwise[:U]       linear: outputs split, in units of U that stay together; the input is whole
#     rowwise           linear: inputs split; results are summed, then the bias is added, once
#     replicate         whole on every rank
#     vocab             embedding split over its rows; one rank has each result, the others add 0
#
# **Dropout.** Ranks must seed torch's default generator alike, as replicated activations must be
# dropped alike. All ranks draw equally many random numbers, so they stay in step. A rank's own
# heads use the same draws as on the other ranks, so head i of every rank has the same mask: the
# dropout probability is right, but masks are not independent between ranks, and differ from those
# of one device.
#
# **Source:** Shoeybi et al. 2019, "Megatron-LM", §3.


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
        _check_head(name, module, text)
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


def _check_head(name: str, module: nn.Module, style: str) -> None:
    """Refuse any style but vocab for a table that the head uses too, as the head expects a part."""
    head = isinstance(module, nn.Embedding) and hasattr(module, "vocabulary")
    if head and style != "vocab":
        table = ", ".join(f"{name}.{own}" for own, _ in module.named_parameters(recurse=False))
        raise ConfigError(
            f"{table} is the model's embedding and its head in one, but the plan gives {name} the "
            f"style {style!r}; allowed: vocab, which splits both over the vocabulary: give "
            f"{name!r} the style vocab"
        )


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
