"""Tensor parallelism: every rank of one mesh axis holds, and computes with, a part of each layer.

By torch's ``parallelize_module``. The plan is data; nothing here knows a particular model. Styles:

    colwise[:U]       linear: outputs split, in units of U that stay together; the input is whole
    rowwise           linear: inputs split; results are summed, and the bias is added once
    replicate         whole on every rank, as is every module that the plan does not name

Sums over ranks have the dtype of what is summed: an activation's or its gradient's, so 16 bits
under autocast, where NCCL and gloo round after each addition.

**Dropout.** Ranks must seed torch's default generator alike, as replicated activations must be
dropped alike. All ranks draw equally many random numbers, so they stay in step. A rank's own
heads use the same draws as on the other ranks, so head i of every rank has the same mask: the
dropout probability is right, but masks are not independent between ranks, and differ from those
of one device.

**Source:** Shoeybi et al. 2019, "Megatron-LM", §3.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from halfstep.distributed import FullySharded
from halfstep.distributed.strategy import ParallelPlan
from halfstep.errors import ConfigError


def parallelize_(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Reduce the model in place to this rank's part of what the first rank of the axis has.

    Names and order of the parameters stay, but those that are split are new objects, DTensors, so
    make the optimizer and :class:`halfstep.Precision` afterwards.

    Args:
        model: A model of the same shapes on every rank of the axis, in any dtypes.
        plan: Module name to style; every other module stays whole on every rank.
        mesh: The tensor axis, a one-dim mesh such as ``mesh["tensor"]``.

    Raises:
        ConfigError: If the plan does not fit the model, or the model the number of ranks. Nothing
            is changed then.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, text in plan.items():
        if name not in modules:
            raise ConfigError(f"the plan names {name!r}, but the model has no such module")
        _check(name, modules[name], text, mesh.size())
    split = {name: text for name, text in plan.items() if text != "replicate"}
    _check_tied(model, split)
    halves = {text.partition(":")[0]: name for name, text in split.items()}
    if len(halves) == 1:  # its forward would fail, in a layer that the plan does not name
        ((half, name),) = halves.items()
        raise ConfigError(
            f"the plan has {half} layers only, such as {name}; what a colwise layer splits, a "
            "rowwise one must take"
        )
    for name, text in split.items():
        style = RowwiseParallel() if text == "rowwise" else ColwiseParallel()
        parallelize_module(modules[name], mesh, style)


def _check(name: str, module: nn.Module, text: str, ranks: int) -> None:
    """Refuse a style that is none, or that does not fit the module or the number of ranks."""
    style, colon, number = text.partition(":")
    unit = int(number) if number.isdecimal() else 0
    if style not in ("colwise", "rowwise", "replicate") or (
        colon and (style != "colwise" or not unit)
    ):
        raise ConfigError(
            f"{name}: unknown style {text!r}; allowed styles: colwise, colwise:U with U >= 1 "
            "outputs that stay together, rowwise, replicate"
        )
    if style == "replicate":
        return
    if not isinstance(module, nn.Linear):
        raise ConfigError(
            f"{name} is a {type(module).__name__}; its style splits nn.Linear only: "
            "give it the style replicate"
        )
    size, what, unit = module.in_features, "inputs", unit or 1
    if style == "colwise":
        size, what = module.out_features, "outputs"
    if size % unit:
        raise ConfigError(f"{name}: {size} {what} are no multiple of the unit {unit}")
    units = size // unit
    if units % ranks:
        fitting = [str(n) for n in range(1, min(units, 2 * ranks) + 1) if units % n == 0]
        pieces = f" in {units} units of {unit} that stay together" if unit > 1 else ""
        raise ConfigError(
            f"{name}: {size} {what}{pieces} cannot be shared equally by {ranks} "
            f"tensor-parallel ranks; allowed for this layer: tensor={', '.join(fitting)}"
        )


def _check_tied(model: nn.Module, split: Mapping[str, str]) -> None:
    """Refuse to split a tied parameter, as each of its modules would get one of its own."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, name)
        if first != name and {first.rpartition(".")[0], name.rpartition(".")[0]} & {*split}:
            raise ConfigError(
                f"{first} and {name} are one parameter, which cannot be split and stay one: "
                "give their modules the style replicate"
            )


class TensorParallel(FullySharded):
    """Splits matrices over the ``tensor`` axis, and what a rank then has over the others."""

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
        if self.layout.batch_ranks > 1:
            super().shard_(model, plan)
