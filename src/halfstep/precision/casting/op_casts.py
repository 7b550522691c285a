"""Applies the op table by torch function modes, which intercept every torch call while entered.

:class:`AutocastCasts` makes a CPU under ``torch.autocast`` compute in the formats of CUDA's
autocast. :class:`StoredCasts` promotes operands of two dtypes under 16-bit weights. Both act
above autograd and autocast, as ``x.float()`` written by hand would, so gradients come back in the
dtype before the cast, and checkpointing and ``torch.compile`` see the casts as part of the model.

Such a mode sees the functions that Python calls, but not what a function written in C++ calls
inside; there torch's own autocast still applies. A function of torch that is written in Python
(``F.multi_head_attention_forward``, ``Tensor.backward``) is run with the mode still on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, reduce
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo import eval_frame as _dynamo
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from halfstep.kernels import attention, library, rows
from halfstep.precision.casting.op_table import (
    MIXED_ON_CPU,
    OPERATORS,
    STORED,
    WRITES,
    Cast,
    before_call,
    drop_casts,
    run_native,
)
from halfstep.precision.masters.accumulation import is_running
from halfstep.precision.policy.policy import LOW

Function = Callable[..., Any]
_DENSE = (torch.strided, torch.jagged, torch._mkldnn)  # type: ignore[attr-defined]
_PRODUCTS = ("native", "compute", "compute_of_two")
_APART = ("fp32_inside", "widest_inside", "rounded", "rounded_self")
_FILLS = ("fill", "fill_self", "into_self", "widest", "as_given")
_RUNS_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_IN_GRAPHS = (checkpoint, Tensor.split, Tensor.unflatten)
_entered = threading.local()


def no_frame(function: Any) -> Any:
    """Keep torch.compile from making a graph of a function that it does not meet inside of one."""
    skip = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)
    _dynamo.set_code_exec_strategy(function.__code__, skip)
    return function


class OpCasts(TorchFunctionMode):
    """A mode that casts nothing: inside another policy's mode it keeps that one's casts out.

    An instance can be entered only once; make a new one for each entry. Of nested modes only the
    innermost acts.
    """

    table: Mapping[Function, Cast] = {}
    as_autocast = False
    """Whether fp64 and the tensors of other devices are left alone."""

    def __init__(self, compute: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.compute = compute
        self.covered = False
        self._running: list[Function] = []

    def __enter__(self) -> OpCasts:
        if not torch.compiler.is_dynamo_compiling():
            modes = _modes()
            if modes:
                modes[-1].covered = True
            modes.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if not torch.compiler.is_dynamo_compiling():
            modes = _modes()
            modes.remove(self)
            if modes:
                modes[-1].covered = False

    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _IN_GRAPHS and torch.compiler.is_compiling():
            return self._in_graph(func, args, kwargs or {})
        cast = self.table.get(func)
        if (cast in WRITES if cast else type(func) in OPERATORS) or (kwargs and "out" in kwargs):
            cast = before_call(cast, func, args, kwargs or {})
        if func in KERNELS and not self.covered and self._runs_kernels() and may_run():
            found = KERNELS[func](*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        plain = type(func) is not FunctionType or func in LEAVES
        if self.covered or (plain and cast is None):
            # the fast path, for most calls, such as every view and shape query of a model
            return func(*args) if kwargs is None else func(*args, **kwargs)
        kwargs = kwargs or {}
        # a Dirichlet's backward, which no autocast is around, has no 16-bit kernel
        if cast is not None and (self._is_on() or func is torch._dirichlet_grad):
            return self._run(cast, func, args, kwargs)
        if cast in _PRODUCTS:
            args, kwargs = _agreed(args, kwargs)
        if plain or torch.compiler.is_compiling() or not self._looks_inside(func):
            return func(*args, **kwargs)
        if not all(map(_overrides_nothing, types)):
            return func(*args, **kwargs)
        return self._inside(func, args, kwargs)

    def _in_graph(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that a graph takes in another way than this mode passes it on."""
        if func is not checkpoint:
            # a method written in Python, which a graph takes, and a cache keeps, as such alone
            method = args[0].split if func is Tensor.split else args[0].unflatten
            return method(*args[1:], **kwargs)

        def body(*given: Any, **named: Any) -> Any:
            with type(self)(self.compute):  # an operator's body is traced when this mode is left
                return args[0](*given, **named)

        with OpCasts():  # which Dynamo lets no body be the first to enter
            pass
        return func(body, *args[1:], **kwargs)

    def _looks_inside(self, func: Function) -> bool:
        """Whether the mode must see the calls that a function written in Python makes."""
        return False

    def _is_on(self) -> bool:
        return False

    def _runs_kernels(self) -> bool:
        """Whether functions that a compiled kernel knows run by it now."""
        return False

    def _run(
        self, cast: Cast, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.as_autocast:
            # CUDA's autocast ignores calls with out=, too; sum(dtype=...) is as the user says
            dtype = kwargs.get("dtype") if cast in ("fp32", "fp32_inside") else None
            if kwargs.get("out") is not None or dtype is not None:
                return func(*args, **kwargs)
        if cast == "fp32":
            args, kwargs = _cast((args, kwargs), torch.float32, self.as_autocast, LOW)
            return func(*args, **kwargs)
        if cast in _PRODUCTS:
            for value in args:  # sparse kernels of 16 bits are few, and of two dtypes none
                if isinstance(value, Tensor) and value.layout not in _DENSE:
                    cast = "fp32_inside"
        if cast in ("native", "operator"):
            return run_native(func, args, kwargs)
        if cast in _FILLS:
            return self._run_filled(cast, func, args, kwargs)
        found = _formats((args, kwargs), self.as_autocast)
        if cast in _APART:
            return self._run_apart(cast, func, args, kwargs, found)
        if cast == "compute":
            args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype("cpu"), True)
        elif len(found) > 1:
            args, kwargs = self._agree(cast, func, args, kwargs, found)
        return func(*args, **kwargs)

    def _run_filled(
        self, cast: Cast, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function whose constants may be beyond the format that it fills."""
        # the second argument of a write says where, as in s[70000] = 1
        args, kwargs = _filled(args, kwargs, 2 if cast == "into_self" else 0)
        if cast == "into_self":
            if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
                args, kwargs = _cast((args, kwargs), args[0].dtype)
        elif cast not in ("fill", "fill_self"):
            found = _formats((args, kwargs), self.as_autocast)
            if cast == "as_given":
                result = func(*args, **kwargs)
                return _cast(result, found.pop()) if len(found) == 1 else result
            if len(found) > 1:
                args, kwargs = _cast((args, kwargs), _widest(found), self.as_autocast)
        return func(*args, **kwargs)

    def _run_apart(
        self, cast: Cast, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any],
        found: set[torch.dtype],
    ) -> Any:  # fmt: skip
        """Run a function whose inner operations autocast must not cast again."""
        widest, given = _widest(found), args
        if cast == "widest_inside":
            args, kwargs = _cast((args, kwargs), widest, self.as_autocast)
        else:
            args, kwargs = _cast((args, kwargs), torch.float32, self.as_autocast, LOW)
        with torch.autocast("cpu", enabled=False):
            result = func(*args, **kwargs)
        if cast == "rounded_self":
            return given[0].copy_(result)
        return _cast(result, widest) if cast == "rounded" else result

    def _agree(
        self, cast: Cast, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any],
        found: set[torch.dtype],
    ) -> tuple[Any, Any]:  # fmt: skip
        """The arguments where the dtypes of operands differ, made one dtype."""
        if cast == "statistics":
            # (input, weight, bias, running mean, running variance): a norm writes the last two in
            # place, which a cast would turn into writing a copy; 16-bit ones torch itself refuses
            first, rest = args[:3], args[3:]
            kept = [*rest[:2], *(v for k, v in kwargs.items() if "running" in k)]
            if any(isinstance(value, Tensor) and value.dtype in LOW for value in kept):
                return args, kwargs
            first, kwargs = _cast((first, kwargs), torch.float32, only=LOW)
            return (*first, *rest), kwargs
        to = _widest(found | {torch.float32} if cast == "fp32_of_two" else found)
        if cast == "compute_of_two":
            compute, out = self.compute, kwargs.get("out")
            if compute not in found:
                return args, kwargs
            if func is F.scaled_dot_product_attention:
                # the lowest fp32 number of a mask would become -inf, and a row of -inf is NaN
                args = (*args[:3], *(_finite(value, compute) for value in args[3:]))
                mask = _finite(kwargs.get("attn_mask"), compute)
                kwargs = kwargs if mask is None else kwargs | {"attn_mask": mask}
            to = compute if out is None else out.dtype
        return _cast((args, kwargs), to, self.as_autocast)  # type: ignore[no-any-return]

    def _inside(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function written in Python so that its calls pass through this mode too."""
        if func in self._running or not _asks(func):
            return func(*args, **kwargs)
        self._running.append(func)
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return _unasked(func)(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._running.pop()


no_frame(OpCasts.__torch_function__)  # where it is around code that runs uncompiled


class AutocastCasts(OpCasts):
    """Applies CUDA's autocast lists on a CPU while ``torch.autocast("cpu")`` is on."""

    table = MIXED_ON_CPU
    as_autocast = True

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not torch.compiler.is_dynamo_compiling() and not inside_casts():
            drop_casts()  # also where somebody else's torch.autocast is around it

    def _is_on(self) -> bool:  # not in fp32 regions; in a backward only for recomputation
        return torch.is_autocast_enabled("cpu")

    def _runs_kernels(self) -> bool:
        return self._is_on() and torch.get_autocast_dtype("cpu") == torch.bfloat16

    def _looks_inside(self, func: Function) -> bool:  # a backward may recompute with autocast on
        return self._is_on() or func in _RUNS_BACKWARD


class StoredCasts(OpCasts):
    """Promotes operands of two dtypes to one under a policy with 16-bit weights."""

    table = STORED

    def _is_on(self) -> bool:
        return True

    def _runs_kernels(self) -> bool:
        return self.compute == torch.bfloat16

    def _looks_inside(self, func: Function) -> bool:
        return True


def inside_casts() -> bool:
    """Whether this thread has entered any mode of this file."""
    return bool(getattr(_entered, "modes", None))


def _modes() -> list[OpCasts]:
    found: list[OpCasts] | None = getattr(_entered, "modes", None)
    if found is None:
        found = _entered.modes = []
    return found


# --- values ---------------------------------------------------------------------------------------


def _agreed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Cast to 16 bits where, in a backward, a user's Function multiplies 16-bit by fp32.

    Its gradients are 16-bit and the tensors it saved are fp32; ``custom_bwd`` does the same.
    """
    if not torch.compiler.is_compiling() and is_running(torch.device("cpu")):
        found = _formats((args, kwargs), True)
        if len(found) == 2 and torch.float32 in found:
            low = min(found, key=lambda dtype: dtype.itemsize)
            return _cast((args, kwargs), low, True)  # type: ignore[no-any-return]
    return args, kwargs


def _formats(value: Any, as_autocast: bool = False) -> set[torch.dtype]:
    """The floating dtypes in arguments; with ``as_autocast``, of tensors that it casts on a CPU."""
    found: set[torch.dtype] = set()
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, Tensor):
            dtype = item.dtype
            if dtype.is_floating_point and not (as_autocast and _is_left_alone(item)):
                found.add(dtype)
        elif isinstance(item, list | tuple | dict):
            found |= _formats(item, as_autocast)
    return found


def _is_left_alone(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float64 or tensor.device.type != "cpu"


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A function's arguments with ``change`` applied to every tensor in them."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is tuple or type(value) is list:
        return type(value)([mapped(item, change) for item in value])
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    return value


def _cast(
    value: Any, to: torch.dtype, as_autocast: bool = False, only: Collection[torch.dtype] = ()
) -> Any:
    """Cast floating tensors in arguments; with ``as_autocast``, only those that it casts."""

    def change(tensor: Tensor) -> Tensor:
        taken = tensor.dtype in only if only else tensor.is_floating_point()
        if not taken or (as_autocast and _is_left_alone(tensor)):
            return tensor
        return tensor.to(to) if tensor.layout in _DENSE else _sparse_cast(tensor, to)

    return mapped(value, change)


def _sparse_cast(tensor: Tensor, to: torch.dtype) -> Tensor:
    """Not by ``to``, whose backward does not take the dense gradient that a matmul gives it."""
    if tensor.dtype == to:
        return tensor
    coo = tensor.to_sparse(layout=torch.sparse_coo).coalesce()
    values = coo.values().to(to)
    cast = torch.sparse_coo_tensor(coo.indices(), values, coo.shape, is_coalesced=True)
    return cast if tensor.layout == torch.sparse_coo else cast.to_sparse(layout=tensor.layout)


def _widest(found: set[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, found) if found else torch.float32


def _filled(
    args: tuple[Any, ...], kwargs: dict[str, Any], first: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments whose constants, from argument ``first`` on, are finite in the format they fill.

    That is the ``dtype=`` given, or that of the tensors that are more than one number.
    """
    named = {k: v for k, v in kwargs.items() if k not in ("alpha", "beta") and _may_overflow(v)}
    if not named and not any(map(_may_overflow, args[first:])):
        return args, kwargs  # as most are
    given = [*args, *kwargs.values()]
    given += given[0] if isinstance(given[0], list | tuple) else []
    floating = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]
    floating.sort(key=lambda x: not x.dim())
    to = kwargs.get("dtype") or (floating[0].dtype if floating else torch.float32)
    if to not in LOW:
        return args, kwargs
    filled = (_finite(v, to) if _may_overflow(v) else v for v in args[first:])
    return (*args[:first], *filled), kwargs | {k: _finite(v, to) for k, v in named.items()}


def _may_overflow(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.dim() and value.is_floating_point()
    return type(value) in (int, float) and 65504 < abs(value) < math.inf


def _finite(value: Any, to: torch.dtype) -> Any:
    """A number or floating tensor whose finite values are so in a format, too; -inf stays -inf."""
    limit = torch.finfo(to).max
    if isinstance(value, int | float):
        return max(-limit, min(limit, value))
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == to:
        return value
    return torch.where(value.isinf(), value, value.clamp(-limit, limit)).to(to)


# --- functions of torch that are written in Python ------------------------------------------------

_PLAIN = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


@cache
def _overrides_nothing(kind: type) -> bool:
    """Whether a tensor class leaves ``__torch_function__`` as torch defines it."""
    override = getattr(kind, "__torch_function__", None)
    known = (_PLAIN, torch._C._disabled_torch_function_impl)
    return getattr(override, "__func__", override) in known


LEAVES: frozenset[Function] = frozenset(
    {
        *(F.dropout, F.embedding, F.relu, F.relu6, F.silu, F.leaky_relu, F.elu),
        *(F.sigmoid, F.tanh, F.glu, F.mish, F.hardswish),
        *(torch.Tensor.split, torch.Tensor.unflatten, torch.split, torch.broadcast_tensors),
    }
)
"""Functions written in Python that models call often and that call no function of the table."""

# What a torch function written in Python asks first, to pass itself to a mode where one is on.
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@cache
def _asks(func: Function) -> bool:
    return isinstance(func, FunctionType) and not set(_CHECKS).isdisjoint(func.__code__.co_names)


@cache
def _unasked(func: Any) -> Function:
    """A copy of a function in which that question is answered no, so that its own code runs."""
    known = func.__globals__ | dict.fromkeys(_CHECKS, lambda *_: False)
    made = FunctionType(func.__code__, known, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


# --- functions that a compiled kernel runs on a CPU -----------------------------------------------
#
# Asked before the table casts anything. What a kernel does not know in this form (its shapes, a
# mask that learns, a tensor of a subclass, a mode that wants to see each operator) stays torch's.

MANY = 2**18
"""Logits and LayerNorms of fewer numbers are torch's: the call costs more than the kernel saves.

**Source:** ``benchmarks/kernels_cpu.py``.
"""
SEVERAL = 2**14
"""Dropout of fewer numbers is torch's, for the same reason."""
FEW_QUERIES = 32
"""Attention of fewer queries, as of a step of generation, is torch's: a tile holds 64.

**Source:** ``benchmarks/kernels_cpu.py``.
"""
_REDUCTIONS = ("none", "sum", "mean")


def may_run() -> bool:
    """Whether kernels may run: not where a compiler, tracer, mode, functorch or AD looks on."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or isinstance(library.loaded(), str)
    )


def is_plain(x: Any) -> bool:
    """Whether a kernel may read it: on a CPU, and of no class that changes what tensors do."""
    return type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu"


def _plain(x: Any) -> bool:
    return is_plain(x) and x.layout == torch.strided


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    given = (query, key, value)
    if not all(_plain(x) and x.dtype in (torch.bfloat16, torch.float32) for x in given):
        return NotImplemented
    if not (torch.is_autocast_enabled("cpu") or any(x.dtype == torch.bfloat16 for x in given)):
        return NotImplemented  # under 16-bit weights, operands all in fp32 mean fp32
    if attn_mask is not None and (is_causal or not _plain(attn_mask)):
        return NotImplemented
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.bfloat16, torch.float32):
        return NotImplemented  # torch refuses a mask of whole numbers
    if not (torch._C._get_flash_sdp_enabled() and 0 <= dropout_p < 1):
        return NotImplemented
    if not attention.fits(*given, attn_mask, enable_gqa) or query.shape[2] < FEW_QUERIES:
        return NotImplemented
    if 2 * key.shape[0] * key.shape[1] < torch.get_num_threads():
        return NotImplemented  # each head of keys is one thread's work; torch divides it further
    query, key, value = (x.to(torch.bfloat16) for x in given)
    return attention.attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _gelu(input: Any, *, approximate: str = "none") -> Any:
    if not (_plain(input) and input.dtype == torch.bfloat16 and approximate == "tanh"):
        return NotImplemented
    return rows.gelu_tanh(input)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not (training and 0 < p < 1) or inplace or not _plain(input):
        return NotImplemented
    if input.dtype not in (torch.bfloat16, torch.float32) or input.numel() < SEVERAL:
        return NotImplemented
    return rows.dropout(input, p)


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    if not _plain(input) or input.dtype != torch.bfloat16 or input.numel() < MANY:
        return NotImplemented  # torch's is as fast on fp32
    return _norm(input, normalized_shape, weight, bias, eps, centred=True)


def _rms_norm(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    in_fp32 = torch.is_autocast_enabled("cpu")  # as the op table has it
    if eps is None and in_fp32:
        eps = torch.finfo(torch.float32).eps
    if eps is None or not _plain(input) or not (in_fp32 or input.dtype == torch.bfloat16):
        return NotImplemented
    return _norm(input, normalized_shape, weight, None, eps, centred=False)


def _norm(x: Any, shape: Any, gain: Any, bias: Any, eps: float, *, centred: bool) -> Any:
    given = [t for t in (x, gain, bias) if t is not None]
    if not all(_plain(t) and t.dtype in (torch.bfloat16, torch.float32) for t in given):
        return NotImplemented
    if tuple(shape) != x.shape[-1:] or not x.numel():
        return NotImplemented
    if any(p is not None and p.shape != x.shape[-1:] for p in (gain, bias)):
        return NotImplemented
    to = reduce(torch.promote_types, [t.dtype for t in given])
    if torch.is_autocast_enabled("cpu"):
        to = torch.float32
    return rows.norm(x, gain, bias, eps, to, centred=centred)


def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    plain = _plain(input) and _plain(target) and input.ndim == 2 and target.ndim == 1
    if not plain or weight is not None or label_smoothing:
        return NotImplemented
    if size_average is not None or reduce is not None or reduction not in _REDUCTIONS:
        return NotImplemented
    if input.dtype not in (torch.bfloat16, torch.float32) or target.dtype != torch.int64:
        return NotImplemented
    if len(input) != len(target) or input.numel() < MANY or input.stride(1) != 1:
        return NotImplemented
    losses = rows.cross_entropy(input, target, ignore_index)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (target != ignore_index).sum()


KERNELS: Mapping[Function, Function] = {
    F.scaled_dot_product_attention: _attention,
    F.gelu: _gelu,
    F.dropout: _dropout,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.cross_entropy: _cross_entropy,
}
"""A function of torch, and what runs in its place where it can."""
