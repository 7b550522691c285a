"""Casts values and modules between formats."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from halfstep.errors import PrecisionError
from halfstep.precision.border import as_device, require_model
from halfstep.precision.casting.autocast import Autocast
from halfstep.precision.low_bit.linear import Clock, LowBitLinear, Region
from halfstep.precision.masters.local_part import fsdp_modules, is_sharded
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.rules import PlacedModel, Placement, place, root_is_fp32
from halfstep.precision.policy.spelling import parse_policy

# A constant because torch.compile in torch 2.11 cannot trace is_autocast_available. The decorator
# for that, assume_constant_result, imports the compiler, which takes as long as importing torch.
WITH_AUTOCAST = frozenset(
    k for k in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(k)
)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor inside ``value``; leave everything else as it is.

    Args:
        value: A tensor, or nested lists, tuples (also named), mappings and dataclasses of tensors.
        dtype: The floating dtype to cast to.

    Returns:
        The same structure. Tensors that already have the dtype are the same objects.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floating(item, dtype) for item in value)
    if type(value) is dict:
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    if isinstance(value, dict):  # a copy keeps a subclass's attributes
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = cast_floating(item, dtype)
        return result
    if isinstance(value, Mapping):
        return type(value)({k: cast_floating(item, dtype) for k, item in value.items()})  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(
            value, **{name: cast_floating(getattr(value, name), dtype) for name in names}
        )
    return value


@torch.no_grad()
def cast_parameters_(module: nn.Module, dtype: torch.dtype | Mapping[str, torch.dtype]) -> None:
    """Cast every floating parameter in place, to one dtype or to a dtype by name.

    Buffers keep their dtype: tables and running statistics lose their meaning in 16 bits.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            wanted = dtype if isinstance(dtype, torch.dtype) else dtype[name]
            if parameter.dtype != wanted:  # true of no sharded one: check_cast refuses those
                parameter.data = parameter.data.to(wanted)


def cast_to_policy_(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Convert a model in place to a policy's formats, rules included, without an optimizer.

    For evaluation and generation inside an :class:`Autocast`; for training,
    :class:`halfstep.Precision` converts. If
    :func:`~halfstep.precision.policy.rules.place` refuses the rules, nothing is changed.
    """
    placed = place(policy, model)
    if policy.casts == "module":  # as FSDP2 gathers them
        cast_parameters_(model, policy.compute_dtype)
    else:
        cast_parameters_(model, placed.dtypes())
    add_regions_(placed)


class CastInputs:
    """A forward pre-hook that casts a 16-bit module's floating inputs to the compute dtype."""

    __name__ = "CastInputs"  # torch.export asks every hook for one

    def __init__(self, policy: PrecisionPolicy, dtype: torch.dtype) -> None:
        self.policy = policy
        self.dtype = dtype

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the cast arguments, with which torch calls the module."""
        return cast_floating(args, self.dtype), cast_floating(kwargs, self.dtype)


def cast_outputs(_: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook that casts floating outputs to fp32, so that the loss is computed in fp32."""
    return cast_floating(output, torch.float32)


def cast_recurrent_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook of LSTM, GRU and RNN that casts floating inputs to the weights' dtype."""
    dtype = next(layer.parameters()).dtype
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


def cast_at_border(placed: PlacedModel, clock: Clock | None = None) -> list[RemovableHandle]:
    """Make ``model(...)`` accept floating inputs of any dtype and return fp32.

    A module whose format by the rules differs from its caller's gets a :class:`FormatRegion`, a
    layer below 16 bits a :class:`~halfstep.precision.low_bit.linear.LowBitLinear`. 16-bit
    recurrent layers get inputs in the weights' dtype, which torch checks before any operation.
    The returned handles remove single hooks; :func:`give_back_` removes everything.
    """
    policy, module, handles = placed.policy, placed.model, []
    add_regions_(placed, clock)
    if policy.param_dtype != torch.float32:
        for part in module.modules():
            if isinstance(part, nn.RNNBase):
                hook = part.register_forward_pre_hook(cast_recurrent_inputs, with_kwargs=True)
                handles.append(hook)
        dtype = torch.float32 if root_is_fp32(policy, module) else policy.compute_dtype
        inputs = CastInputs(policy, dtype)
        handles.append(module.register_forward_pre_hook(inputs, with_kwargs=True))
    if policy.compute_dtype != torch.float32:
        handles.append(module.register_forward_hook(cast_outputs))
    return handles


class FormatRegion(Region):
    """The forward of a module whose format, by a rule, differs from that of the module around it.

    A module kept in fp32: floating inputs are cast to fp32, autocast is off, and floating outputs
    are cast to the surrounding format. With 16-bit weights that is the compute dtype. Under
    ``*-mixed`` outputs stay fp32: autocast itself casts operands of products, and sums such as a
    residual stream keep their bits; CUDA's autocast does the same after an operation of its fp32
    list. Nothing here depends on the operation or device, so dtypes are equal on CPU and CUDA.

    A module in the policy's own format inside an fp32 module: inputs are cast to the compute dtype
    or autocast is turned on again, and outputs are cast to fp32.
    """

    def __init__(self, policy: PrecisionPolicy, placement: Placement) -> None:
        compute, stored_low = policy.compute_dtype, policy.param_dtype != torch.float32
        low = compute if stored_low else None
        super().__init__(placement.module)
        self.inputs = torch.float32 if placement.fp32 else low
        self.outputs = torch.float32 if placement.around_fp32 else low
        self.autocast = None if placement.fp32 or not policy.casts_per_op else compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward in the region's format."""
        if self.inputs is not None:
            args, kwargs = cast_floating(args, self.inputs), cast_floating(kwargs, self.inputs)
        with self._context(_device_type(self.module, args, kwargs)):
            output = self.inside(args, kwargs)
        return output if self.outputs is None else cast_floating(output, self.outputs)

    def _context(self, device_type: str) -> AbstractContextManager[object]:
        if device_type not in WITH_AUTOCAST:
            return nullcontext()
        if self.autocast is not None:
            return torch.autocast(device_type, dtype=self.autocast)
        if torch.is_autocast_enabled(device_type):
            return torch.autocast(device_type, enabled=False)
        return nullcontext()


around_model = Autocast
"""The name by which evaluation and generation use :class:`Autocast`."""


def keeping_casts(device: torch.device) -> AbstractContextManager[Any]:
    """A context around several forwards with the same weights, whose casts it keeps between them.

    ``torch.autocast`` drops its 16-bit copies of the weights when the outermost context ends, which
    otherwise is each forward's.
    """
    if device.type not in WITH_AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocast(
    policy: str | PrecisionPolicy, device: str | torch.device, model: nn.Module | None = None
) -> Autocast:
    """The context for a forward under a policy, without an optimizer.

    In training use :meth:`halfstep.Precision.autocast`, which knows model and device.

    Args:
        policy: A policy, its name, field string or ``.toml`` file.
        device: Where the forward runs, such as ``"cpu"``.
        model: Needed if the policy has 16-bit weights or rules for modules. It must already be in
            the policy's formats; it is not changed.

    Raises:
        PrecisionError: If the device cannot honour the policy, or the model does not fit it.

    Example:
        >>> with autocast("bf16-mixed", "cpu"):
        ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.bfloat16
    """
    where = as_device(device)
    value = parse_policy(policy, where)
    if model is not None:
        require_model(model, "autocast(model)")
    context = Autocast(value, model, where)
    low = value.param_dtype != torch.float32
    if model is not None:
        check_wrappers(value, model)
        _require_prepared(value, model)
    elif value.rules or low or value.recipes() or value.casts == "module":
        what = "has rules for modules" if value.rules else "says how weights are stored"
        what = "rounds the operands of linear layers" if value.recipes() else what
        raise PrecisionError(
            f"policy {value} {what}, so that autocast needs the model: autocast(policy, device, "
            "model) with one that halfstep.Precision has prepared; in training use "
            "precision.autocast()"
        )
    return context


def _require_prepared(policy: PrecisionPolicy, model: nn.Module) -> None:
    """Refuse a model whose weights or modules are not in the policy's formats."""
    placed = place(policy, model)
    cure = "prepare it by halfstep.Precision"
    if policy.param_dtype != torch.float32:
        wanted = placed.dtypes()
        for name, parameter in model.named_parameters():
            if name in wanted and parameter.dtype != wanted[name]:
                raise PrecisionError(
                    f"{name} is stored in {dtype_name(parameter.dtype)}, and policy {policy} "
                    f"stores it in {dtype_name(wanted[name])}; {cure}"
                )
    for placement in placed.regions:
        if not isinstance(placement.module.__dict__.get("forward"), Region):
            raise PrecisionError(
                f"rule {placement.rule!r} of policy {policy} is not applied to "
                f"{placement.name or 'the model'}; {cure}"
            )
    for placement in placed.low:
        has = getattr(low_bit_of(placement.module), "recipe", "none")
        if has != placement.recipe:
            raise PrecisionError(
                f"{placement.name or 'the model'} has recipe {has}, and policy {policy} says "
                f"{placement.recipe}; prepare the model by halfstep.Precision"
            )


def low_bit_of(module: nn.Module) -> LowBitLinear | None:
    """What makes a layer multiply below 16 bits, inside of a region if it has one."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, Region) and not isinstance(forward, LowBitLinear):
        forward = forward.replaced
    return forward if isinstance(forward, LowBitLinear) else None


def _device_type(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The type of device a module computes on: that of its parameters, else of its arguments."""
    for tensor in module.parameters():
        return tensor.device.type
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
    return "cpu"


def keep_fused_paths_off(module: nn.Module, args: Any) -> None:
    """A forward pre-hook that does nothing but keep torch from skipping a module's call.

    Without a hook, ``TransformerEncoderLayer`` in evaluation passes its submodules' weights to one
    fused kernel and calls none of them.
    """


def add_regions_(placed: PlacedModel, clock: Clock | None = None) -> None:
    """Make every module compute as the policy's rules say; existing regions are removed first."""
    clock = Clock() if clock is None else clock
    remove_regions_(placed.model)
    for placement in placed.low:
        placement.module.forward = LowBitLinear(placement, clock)
        placement.module.register_forward_pre_hook(keep_fused_paths_off)
    for placement in {id(p.module): p for p in reversed(placed.regions)}.values():
        placement.module.forward = FormatRegion(placed.policy, placement)
        placement.module.register_forward_pre_hook(keep_fused_paths_off)


def remove_regions_(model: nn.Module) -> None:
    """Restore every module's own forward."""
    for module in model.modules():
        while isinstance(region := module.__dict__.get("forward"), Region):
            del module.forward
            if region.replaced is not None:
                module.forward = region.replaced
            for key, hook in list(module._forward_pre_hooks.items()):
                if hook is keep_fused_paths_off:
                    del module._forward_pre_hooks[key]


def is_cast(value: object) -> bool:
    """Whether a hook or a replaced ``forward`` was put on a module by :func:`cast_at_border`."""
    plain = (cast_outputs, cast_recurrent_inputs, keep_fused_paths_off)
    return isinstance(value, CastInputs | Region) or any(value is hook for hook in plain)


def give_back_(model: nn.Module) -> None:
    """Remove everything that :func:`cast_at_border` has put on a model, regions included."""
    remove_regions_(model)
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if is_cast(hook):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


# Checks that torch's wrappers around a model treat weights and gradients as the policy says.
#
# A wrapper has formats of its own: FSDP2 gathers weights in its ``param_dtype`` and sums gradients
# in its ``reduce_dtype``, whatever the policy says; DDP sums ``parameter.grad``, which masters and
# buffers have already taken over by then. None of them warns.


def check_wrappers(policy: PrecisionPolicy, model: nn.Module) -> None:
    """Refuse a model whose wrapper computes or sums gradients in other formats than the policy."""
    moves_on = policy.has_masters or policy.update != "nearest"  # gradients do
    for name, module in model.named_modules():
        what = name or "the model"
        if hasattr(module, "_fsdp_wrapped_module"):
            raise PrecisionError(
                f"{what} is a FullyShardedDataParallel (FSDP1), whose flat parameters do not say "
                "which part a rank holds, so norms cannot be computed; use "
                "torch.distributed.fsdp.fully_shard"
            )
        if isinstance(module, DistributedDataParallel) and moves_on:
            raise PrecisionError(
                f"{what} is a DistributedDataParallel, which sums parameter.grad: under policy "
                f"{policy} gradients have moved on by then, and every rank would train by "
                "its own; use halfstep.distributed (parallel=data=N), or bf16-mixed"
            )
    found = dict(fsdp_modules(model))
    for name, state in found.items():
        _check_casts(policy, name or "the model", getattr(state, "_mp_policy", None))
    if policy.casts == "module":
        outside = [n for n, p in model.named_parameters() if not is_sharded(p)]
        if not found or outside:
            raise PrecisionError(
                f"policy {policy} computes in {dtype_name(policy.compute_dtype)} where FSDP2 "
                f"gathers weights, and {outside[0] if outside else 'this model'} is not sharded "
                "by it: use torch.distributed.fsdp.fully_shard, or halfstep.distributed "
                "(parallel=shard=N), or policy bf16-mixed"
            )


def _check_casts(policy: PrecisionPolicy, what: str, casts: Any) -> None:
    """Refuse one module's FSDP2 ``MixedPrecisionPolicy`` if it contradicts the policy."""
    gathered = getattr(casts, "param_dtype", None) or policy.param_dtype
    summed = getattr(casts, "reduce_dtype", None) or gathered
    output = getattr(casts, "output_dtype", None) or torch.float32
    wanted = policy.compute_dtype if policy.casts == "module" else policy.param_dtype
    if gathered != wanted:
        nearest = "bf16-module" if gathered == torch.bfloat16 else "bf16-mixed"
        raise PrecisionError(
            f"{what} is sharded by fully_shard with MixedPrecisionPolicy(param_dtype="
            f"{dtype_name(gathered)}), so it computes with weights in that format, and policy "
            f"{policy} asks for {dtype_name(wanted)} there; use "
            f"param_dtype={_written(policy, wanted)}, or policy {nearest}"
        )
    if summed != policy.reduce_dtype:
        raise PrecisionError(
            f"{what} is sharded by fully_shard with MixedPrecisionPolicy that sums gradients in "
            f"{dtype_name(summed)}, and policy {policy} in {dtype_name(policy.reduce_dtype)}; use "
            f"reduce_dtype={policy.reduce_dtype}, or the policy with reduce={dtype_name(summed)}"
        )
    if output not in (torch.float32, wanted):
        raise PrecisionError(
            f"{what} is sharded by fully_shard with MixedPrecisionPolicy(output_dtype="
            f"{dtype_name(output)}), and policy {policy} hands out fp32; leave output_dtype out"
        )


def _written(policy: PrecisionPolicy, wanted: torch.dtype) -> str:
    """``param_dtype`` as the user must write it; None there means "as stored"."""
    return str(wanted) if policy.casts == "module" else "None"
