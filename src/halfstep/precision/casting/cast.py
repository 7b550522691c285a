"""Casts values and modules between formats."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import halfstep.precision.low_bit as low_bit
from halfstep.errors import PrecisionError
from halfstep.precision.border import as_device
from halfstep.precision.casting.autocast import Autocast, outside_graphs
from halfstep.precision.casting.op_casts import inside_casts, no_frame
from halfstep.precision.masters.local_part import (
    cast_,
    fsdp_modules,
    fsdp_parameters,
    is_sharded,
)
from halfstep.precision.masters.reduction import require_no_hook, wrappers_of
from halfstep.precision.masters.rounding import random_key
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.rules import PlacedModel, Placement, has_forward, has_stacks, place
from halfstep.precision.policy.spelling import parse_policy

# A constant because torch.compile in torch 2.11 cannot trace is_autocast_available. The decorator
# for that, assume_constant_result, imports the compiler, which takes as long as importing torch.
WITH_AUTOCAST = frozenset(
    k for k in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(k)
)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor inside ``value``; leave everything else as it is.

    That is a tensor, or nested lists, tuples (also named), mappings and dataclasses of tensors.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floating(item, dtype) for item in value)
    if type(value) is dict:
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        # a copy keeps a subclass's attributes, but torch 2.11 makes no graph of it
        traced = torch.compiler.is_compiling() and dataclasses.is_dataclass(value)
        result: Any = dataclasses.replace(value) if traced else copy.copy(value)  # type: ignore[type-var]
        for key, item in value.items():
            result[key] = cast_floating(item, dtype)
        return result
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
    sharded = fsdp_parameters(module)
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            wanted = dtype if isinstance(dtype, torch.dtype) else dtype[name]
            if parameter.dtype != wanted:
                cast_(parameter, wanted, sharded)


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

    @no_frame
    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the cast arguments, with which torch calls the module."""
        return cast_floating(args, self.dtype), cast_floating(kwargs, self.dtype)


@no_frame  # a compiled model calls its hooks around its graph
def cast_outputs(_: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook that casts floating outputs to fp32, so that the loss is computed in fp32."""
    return cast_floating(output, torch.float32)


def cast_at_border(placed: PlacedModel, clock: Clock | None = None) -> None:
    """Make ``model(...)`` accept floating inputs of any dtype and return fp32.

    A module whose format by the rules differs from its caller's gets a :class:`FormatRegion`, a
    layer below 16 bits a :class:`~halfstep.precision.low_bit.linear.LowBitLinear`. 16-bit
    recurrent layers get inputs in the weights' dtype, which torch checks before any operation.
    :func:`give_back_` removes everything.
    """
    policy = placed.policy
    add_regions_(placed, clock)
    if policy.param_dtype != torch.float32:
        recurrent = {id(p.module): p for p in placed.modules if isinstance(p.module, nn.RNNBase)}
        for part in (placed.modules[0], *recurrent.values()):
            inputs = CastInputs(policy, torch.float32 if part.fp32 else policy.compute_dtype)
            part.module.register_forward_pre_hook(inputs, with_kwargs=True)
        around = Autocast(policy, placed.model, as_device(_device_type(placed.model, (), {})))
        for module in placed.model.modules():
            if (
                type(module).forward is not nn.Module.forward
                and next(module.parameters(), None) is not None
            ):
                recurs = any(isinstance(part, nn.RNNBase) for part in module.modules())
                kind = RecurrentCall if recurs else OutsideCall
                kind(module, around).attach()
    if policy.compute_dtype != torch.float32:
        placed.model.register_forward_hook(cast_outputs)


class Region:
    """What a module calls in place of its ``forward``, which it wraps.

    Unlike a pair of hooks, it cannot leave the context open when a forward is interrupted, holds no
    state between calls (recursion, threads, recomputation), and is traced, copied and pickled with
    its module; parameters, buffers and the keys of ``state_dict`` are untouched.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced = module.__dict__.get("forward")

    def attach(self) -> None:
        """Put it into the module's attributes."""
        kind: Any = type(self.module)
        self.module.forward = MethodType(_door(kind), self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, after the module was pickled: by this name the method is found again."""
        call: Any = self
        return call(*args, **kwargs)

    def inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own forward."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


@cache
def _door(kind: type[nn.Module]) -> Callable[..., Any]:
    """The function that calls the regions of all modules of a class.

    torch.compile guards a ``forward`` in a module's attributes by its identity, but a method by its
    function: so blocks that are compiled one by one share their graph.
    """

    @wraps(kind.forward)  # inspect shows the signature
    def forward(region: Any, *args: Any, **kwargs: Any) -> Any:
        return region(*args, **kwargs)

    return forward


def region_of(module: nn.Module) -> Region | None:
    """The outermost region around a module's own forward."""
    forward = module.__dict__.get("forward")
    owner = getattr(forward, "__self__", forward)
    return owner if isinstance(owner, Region) else None


class Clock:
    """Says by which random bits a step rounds; its owner counts steps, taken or skipped.

    Ranks, which see other parts of a batch, draw other bits.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.step = 0
        self._drawn: dict[int, int] = {}
        self._drawn_at = 0
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state  # a copy is a clock of its own
        self.number = next(_numbers)
        _clocks[self.number] = self

    def draw(self, stream: int) -> int:
        """The key of random bits: another one for each step, stream, rank and micro-batch."""
        if self._drawn_at != self.step:
            self._drawn.clear()
            self._drawn_at = self.step
        drawn = self._drawn.get(stream, 0)
        self._drawn[stream] = drawn + 1
        return random_key(drawn + (self.rank << 16), self.step, stream)


_numbers = itertools.count()
_clocks: weakref.WeakValueDictionary[int, Clock] = weakref.WeakValueDictionary()


@torch.library.custom_op(
    "halfstep::draw", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,),
    schema="(Tensor rounded, int clock, int stream) -> Tensor",
)  # fmt: skip
def draw(rounded: Tensor, clock: int, stream: int) -> Tensor:
    """:meth:`Clock.draw` for a tensor, as an operator, which a graph runs again in every step."""
    return torch.full((), _clocks[clock].draw(stream), device=rounded.device)


draw.register_fake(lambda rounded, *_: rounded.new_empty((), dtype=torch.int64))


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
        known = device_type in WITH_AUTOCAST
        if known and self.autocast is not None:
            return torch.autocast(device_type, dtype=self.autocast)
        if known and torch.is_autocast_enabled(device_type):
            return torch.autocast(device_type, enabled=False)
        return nullcontext()


class OutsideCall(Region):
    """The forward of a module with 16-bit weights, which may be called outside of every context.

    There it runs as inside, and gives fp32 as the whole model does: after training by hand, by a
    method of the model other than ``forward``, or of an average that copies it.
    """

    def __init__(self, module: nn.Module, around: Autocast) -> None:
        super().__init__(module)
        self._around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, in a context if there is none."""
        if torch.compiler.is_compiling() or inside_casts():
            return self.inside(args, kwargs)
        with self._around:
            output = self.inside(args, kwargs)
        if torch._C._current_graph_task_id() >= 0:
            return output  # checkpointing recomputes a part of what was called
        return cast_floating(output, torch.float32)


class RecurrentCall(OutsideCall):
    """The same of what has a recurrent layer, which torch.compile cannot trace: it is not asked."""

    def attach(self) -> None:
        """Put it into the module's attributes as it is: a method would be traced up to here."""
        self.module.forward = self

    __call__ = outside_graphs(OutsideCall.__call__, recursive=False)
    inside = outside_graphs(OutsideCall.inside, recursive=False)


def autocast(policy: str | PrecisionPolicy, device: str | torch.device) -> Autocast:
    """The context for a forward under a policy, without an optimizer.

    In training use :meth:`halfstep.Precision.autocast`, which knows model and device. Called in a
    function that torch.compile traces, it holds torch's switches of fp32 matmuls from then on.

    Args:
        policy: A policy, its name or field string: one that casts operations alone, without rules,
            recipes or 16-bit weights.
        device: Where the forward runs, such as ``"cpu"``.

    Raises:
        PrecisionError: If the device cannot honour the policy, or it says more of a model.

    Example:
        >>> with autocast("bf16-mixed", "cpu"):
        ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.bfloat16
    """
    return _made[_make(policy, device)].here()


_made: dict[str, Autocast] = {}  # which is the same context however often it is asked for


def _make(policy: str | PrecisionPolicy, device: str | torch.device) -> str:
    where = as_device(device)
    value = parse_policy(policy, where)
    casts_alone = value.param_dtype == torch.float32 and value.casts == "op"
    if value.rules or value.recipes() or not casts_alone:
        raise PrecisionError(
            f"policy {value} says more of a model than how operations are cast, which "
            "halfstep.autocast does alone; use halfstep.Precision and its autocast()"
        )
    name = f"{value} on {where}"
    _made.setdefault(name, Autocast(value, None, where))
    return name


# torch.compile runs it where it traces a call, and keeps the name alone
_make._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    """Make every module compute as the policy's rules say; what it had is given back first."""
    clock = Clock() if clock is None else clock
    give_back_(placed.model)
    for placement in placed.low:
        if low_bit.stays_bf16(placement):
            continue
        low_bit.LowBitLinear(placement, clock).attach()
        placement.module.register_forward_pre_hook(keep_fused_paths_off)
    if placed.policy.casts_per_op:
        for module in placed.model.modules():
            lists = [child for child in module.children() if not has_forward(child)]
            if has_forward(module) and any(map(has_stacks, [module, *lists])):
                GroupedRegion(module).attach()
    for placement in {id(p.module): p for p in reversed(placed.regions)}.values():
        FormatRegion(placed.policy, placement).attach()
        placement.module.register_forward_pre_hook(keep_fused_paths_off)


# the last is transformers', which takes fp32 weights in a graph of torch.compile
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


class GroupedCasts(TorchFunctionMode):
    """Casts what grouped matmuls multiply, as torch's autocast, which does not know them, would."""

    @no_frame
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _GROUPED:
            kind = args[1].device.type
            if torch.is_autocast_enabled(kind):
                low = torch.get_autocast_dtype(kind)
                func, args = F.grouped_mm, (args[0].to(low), args[1].to(low), *args[2:])
        return func(*args, **(kwargs or {}))


class GroupedRegion(Region):
    """The forward of a module with experts, whose grouped matmuls torch's autocast does not cast.

    Without it CUDA runs them in fp32, expert by expert, and so do graphs of transformers' experts.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, in a mode that sees grouped matmuls."""
        with GroupedCasts():
            return self.inside(args, kwargs)


def is_cast(value: object) -> bool:
    """Whether a hook or a replaced ``forward`` was put on a module by :func:`cast_at_border`."""
    plain = (cast_outputs, keep_fused_paths_off)
    region = isinstance(getattr(value, "__self__", value), Region)
    return region or isinstance(value, CastInputs) or any(value is hook for hook in plain)


def give_back_(model: nn.Module) -> None:
    """Remove everything that :func:`cast_at_border` has put on a model, regions included."""
    for module in model.modules():
        while (region := region_of(module)) is not None:
            del module.forward
            if region.replaced is not None:
                module.forward = region.replaced
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if is_cast(hook):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


# Checks that torch's wrappers around a model treat weights and gradients as the policy says.
#
# A wrapper has formats of its own: FSDP2 gathers weights in its ``param_dtype`` and sums gradients
# in its ``reduce_dtype``, whatever the policy says. It does not warn.


def check_wrappers(policy: PrecisionPolicy, model: nn.Module) -> None:
    """Refuse a model whose wrapper computes or sums gradients in other formats than the policy."""
    for name, module in model.named_modules():
        what = name or "the model"
        if hasattr(module, "_fsdp_wrapped_module"):
            raise PrecisionError(
                f"{what} is a FullyShardedDataParallel (FSDP1), whose flat parameters do not say "
                "which part a rank holds; use torch.distributed.fsdp.fully_shard"
            )
    for wrapper in wrappers_of(policy, [*model.parameters()]):
        require_no_hook(policy, wrapper)
    found = dict(fsdp_modules(model))
    for name, state in found.items():
        _check_casts(policy, name or "the model", getattr(state, "_mp_policy", None))
    outside = [n for n, p in model.named_parameters() if not is_sharded(p)]
    if policy.casts == "module" and (not found or outside):
        raise PrecisionError(
            f"policy {policy} computes in {dtype_name(policy.compute_dtype)} where FSDP2 gathers "
            f"weights, and {outside[0] if outside else 'this model'} is not sharded by it: use "
            "torch.distributed.fsdp.fully_shard, or halfstep.distributed (parallel=shard=N), or "
            "policy bf16-mixed"
        )


def _check_casts(policy: PrecisionPolicy, what: str, casts: Any) -> None:
    """Refuse one module's FSDP2 ``MixedPrecisionPolicy`` if it contradicts the policy."""
    by_module = policy.casts == "module"
    computes = policy.compute_dtype if by_module else policy.param_dtype
    gathered = getattr(casts, "param_dtype", None) or policy.param_dtype
    summed = getattr(casts, "reduce_dtype", None) or policy.reduce_dtype
    given = getattr(casts, "output_dtype", None) or torch.float32
    reduces, field = policy.reduce_dtype, f"reduce={dtype_name(summed)}"
    right = f"param_dtype={computes if by_module else None}, reduce_dtype={reduces}"
    named = "bf16-module" + f",{field}" * (summed != torch.float32)
    for key, has, wanted, other in (
        ("param_dtype", gathered, (computes,), named if gathered == torch.bfloat16 else ""),
        ("reduce_dtype", summed, (reduces,), field),
        ("output_dtype", given, (torch.float32, computes), ""),
    ):
        if has not in wanted:
            raise PrecisionError(
                f"{what} is sharded by fully_shard with MixedPrecisionPolicy({key}="
                f"{dtype_name(has)}), and policy {policy} has {dtype_name(wanted[0])} there; use "
                f"MixedPrecisionPolicy({right})" + f", or policy {other}" * bool(other)
            )
