"""Whether a device can honour a policy, and the contexts for a forward and a backward under it.

``torch.autocast`` warns and disables itself for a combination it does not support; here such a
combination is refused before anything runs, with the nearest policy that works.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._functorch import config as functorch_config
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

import halfstep.precision.low_bit as low_bit
from halfstep.errors import PrecisionError
from halfstep.precision.border import as_device
from halfstep.precision.casting.op_casts import (
    AutocastCasts,
    OpCasts,
    StoredCasts,
    inside_casts,
    mapped,
)
from halfstep.precision.masters.accumulation import is_running
from halfstep.precision.policy.devices import cpu_has_bf16, first_capability
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.rules import root_is_fp32
from halfstep.precision.policy.spelling import parse_policy

outside_graphs = _disable_dynamo
"""``torch.compiler.disable``, which imports the compiler at the first call, not with halfstep."""
Status = Literal["native", "simulated", "refused"]
_Context = contextlib.AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class Support:
    """How a device runs a policy."""

    status: Status
    """``"native"``: the device has instructions for it. ``"simulated"``: halfstep runs 16-bit
    products through fp32 kernels with 16-bit rounding, which gives the format's results and memory
    use but not its speed. ``"refused"``: it cannot run."""
    reason: str
    """One sentence for the user."""
    nearest: str = ""
    """For ``"refused"``, the policy to ask for instead."""


def support(policy: str | PrecisionPolicy, device: str | torch.device) -> Support:
    """Tell how a device runs a policy; needs no GPU memory and changes nothing.

    Args:
        policy: A policy, its name or field string.
        device: A device or its name.

    Raises:
        PrecisionError: If ``policy`` or ``device`` cannot be parsed.

    **Source:** the rows of :data:`halfstep.precision.policy.devices.DEVICES`.
    """
    device = as_device(device)
    policy = parse_policy(policy, device)
    found = _support_of_16_bits(policy, device)
    names = [scheme.name for scheme in policy.schemes()]
    if found.status == "refused" or not names:
        return found
    lacking = {name: why for name in names if (why := low_bit.why_not_native(name, device))}
    if not lacking:
        return Support("native", f"{', '.join(names)} products; {found.reason}")
    if policy.simulate:
        forms = ", ".join(lacking)
        how = f"operands are rounded to {forms} exactly, and multiplied as bf16; {found.reason}"
        return Support("simulated", how)
    reason = f"{'; '.join(lacking.values())}; add simulate=yes"
    return Support("refused", reason, str(replace(policy, simulate=True)))


def _support_of_16_bits(policy: PrecisionPolicy, device: torch.device) -> Support:
    """How a device runs a policy's formats of 16 bits and more."""
    what = "tf32" if policy.tf32 else dtype_name(policy.compute_dtype)
    if device.type == "cpu":
        if policy.tf32:
            return Support("refused", "a CPU has no tf32 matrix instructions", "fp32")
        if _is_simulated(policy, device):
            how = f"{what} products run through fp32 kernels with {what} rounding"
            return Support("simulated", how)
        return Support("native", f"{what} matrix kernels of this CPU")
    if device.type == "cuda" and torch.cuda.is_available():
        has, needed = torch.cuda.get_device_capability(device), first_capability(what)
        here = "compute capability {}.{}".format(*has)
        if has >= needed:
            return Support("native", f"{what} on {here}")
        fp16 = what == "bf16" and has >= first_capability("fp16")
        lacks = f"{here} has no {what} tensor cores ({'{}.{}'.format(*needed)} has)"
        return Support("refused", lacks, "fp16-mixed" if fp16 else "fp32")
    known = device.type == "cuda"
    reason = "torch sees no CUDA device" if known else f"device {device.type!r} is not supported"
    if policy.recipes() and not policy.simulate:
        policy = replace(policy, simulate=True)
    return Support("refused", reason, f"{'fp32' if policy.tf32 else policy} on --device cpu")


def require_support(policy: PrecisionPolicy, device: torch.device) -> Support:
    """How the device runs the policy; if it cannot, an error names the nearest policy that can."""
    found = support(policy, device)
    if found.status == "refused":
        raise PrecisionError(
            f"precision {policy} cannot be honoured on {device}: {found.reason}; the nearest that "
            f"can is {found.nearest}"
        )
    return found


def _is_simulated(policy: PrecisionPolicy, device: torch.device) -> bool:
    """Whether a policy's matrix products are simulated by fp32 kernels (fp16 is on every CPU)."""
    compute = policy.compute_dtype
    missing = compute == torch.float16 or (compute == torch.bfloat16 and not cpu_has_bf16())
    return device.type == "cpu" and missing


class Autocast(contextlib.ContextDecorator):
    """The context for a forward and its loss, under one policy.

    Like ``torch.autocast`` it can be entered any number of times, nested, from several threads, and
    used as a decorator. Under ``*-mixed`` policies each operation is cast by CUDA's autocast lists,
    on every device; with 16-bit weights, operands of two dtypes are promoted. torch's process-wide
    switches of fp32 matmuls are held where they contradict the policy, until the context is left.

    Args:
        policy: The policy to compute under.
        model: The model whose forward it is for; needed if a rule matches the model itself.
        device: The device it runs on.
        on_enter: Called at every entry, before anything is entered.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        model: nn.Module | None,
        device: torch.device,
        on_enter: Callable[[], None] | None = None,
    ) -> None:
        require_support(policy, device)
        if policy.param_dtype != torch.float32:
            _show_losses()
        self.policy = policy
        self.device = device
        self.on_enter = on_enter
        self._simulated = _is_simulated(policy, device)
        self._rounding: Literal["ieee", "tf32"] = "tf32" if policy.tf32 else "ieee"
        self._held: weakref.finalize[..., Autocast] | None = None
        self._holds = False
        self.casts_per_op = policy.casts_per_op
        self._root_per_op = self.casts_per_op and not (
            model is not None and root_is_fp32(policy, model)
        )

    @outside_graphs
    def __enter__(self) -> None:
        if self.on_enter is not None:
            self.on_enter()
        context = self._forward()
        context.__enter__()
        _active().append((self, context))

    @outside_graphs
    def __exit__(self, *error: Any) -> None:
        entries = _active()
        # not always the last entry: a generator may leave its context after newer ones opened
        last = max(i for i, (context, _) in enumerate(entries) if context is self)
        _, context = entries.pop(last)
        context.__exit__(*error)

    @contextlib.contextmanager
    def _forward(self) -> Iterator[None]:
        # With rules, torch.compile would trace the backward under the autocast around the whole
        # graph and so round in fp32 modules' backward. The patch is local to this thread.
        by_rules = self.policy.rules and self.casts_per_op
        patch = functorch_config.patch(backward_pass_autocast="off") if by_rules else _NOTHING
        with patch, self._pins(), self._casts(self._root_per_op):
            yield

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """The context that a backward needs, whatever contexts surround it.

        It pins fp32 products, simulates formats that a CPU has no instructions for, turns off an
        outer ``torch.autocast``, which would change the requested precision, and gives what
        activation checkpointing recomputes the same casts as in the forward.
        """
        # autograd would otherwise use its own thread, in which no mode is entered
        alone = self.device.type == "cuda" and self.policy.param_dtype != torch.float32
        threads = torch.autograd.set_multithreading_enabled(False) if alone else _NOTHING
        with threads, self._pins(), self._casts(False):
            yield

    def here(self) -> Autocast:
        """What to enter: this context, or, where torch.compile traces the entry, its equivalent."""
        traced = torch.compiler.is_dynamo_compiling() and not self._simulated
        return self._in_graph() if traced else self  # type: ignore[return-value]

    _recreate_cm = here  # of a decorated function

    @contextlib.contextmanager
    def _in_graph(self) -> Iterator[None]:
        """The context of a part of a graph; the switches stay held, as no graph can set them."""
        self._hold_switches()
        if not self._holds:  # asked, so that another Precision's graph is traced and holds its own
            raise AssertionError
        _traced.append(self)
        try:
            with self._casts(self._root_per_op):
                yield
        finally:
            _traced.pop()

    @contextlib.contextmanager
    def _casts(self, per_op: bool) -> Iterator[None]:
        """The context of the policy's casts alone, with those of ``torch.autocast`` or without."""
        device, compute = self.device.type, self.policy.compute_dtype
        off = on = simulated = mode = _NOTHING
        if torch.is_autocast_enabled(device):
            off = torch.autocast(device, enabled=False)
        if self._simulated:
            simulated = SimulatedProducts(compute)
        if self.policy.param_dtype != torch.float32:
            mode = StoredCasts(compute)
        elif device == "cpu" and self.casts_per_op:
            mode = AutocastCasts()
        elif inside_casts():  # shadows outer casts, which are another policy's
            mode = OpCasts()
        if per_op:
            on = torch.autocast(device, dtype=compute)
        with off, simulated, mode, on:
            yield

    def _pins(self) -> _Context:
        """What holds the switches that contradict the policy."""
        wrong = tuple(
            switch
            for switch in SWITCHES.get(self.device.type, ())
            # one that is held for somebody else is right only until he lets go of it
            if switch in held_switches or setting_of(*switch) not in MEANS[self._rounding]
        )
        return pinned(wrong, self._rounding) if wrong else _NOTHING

    def _hold_switches(self) -> bool:
        """Hold the switches from now on, until :meth:`release` or the end of this object."""
        if self._held is None:
            stack = contextlib.ExitStack()
            stack.enter_context(self._pins())
            self._held = weakref.finalize(self, stack.close)
            self._holds = True
        return True

    # torch.compile runs it where it traces a call, and leaves nothing of it in the graph
    _hold_switches._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def release(self) -> None:
        """Let go of the switches that are held for compiled functions."""
        if self._held is not None:
            self._held()
            self._held, self._holds = None, False


def _show_losses() -> None:
    """Let modes see the call of an ``nn.CrossEntropyLoss()`` that a compiled function makes.

    Of all modules, Dynamo puts the function of this one into the graph without asking them.
    """
    variables: Any = torch._dynamo.variables

    def made(_: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        def loss(input: Any, target: Any) -> Any:
            function = variables.base.VariableTracker.build(tx, F.cross_entropy)
            return function.call_function(tx, [input, target, *args], kwargs)

        return variables.LambdaVariable(loss)

    variables.UserDefinedClassVariable._call_cross_entropy_loss = made


_NOTHING: _Context = contextlib.nullcontext()
_entered = threading.local()
_traced: list[Autocast] = []  # of the graph that torch.compile traces, which it does one by one


def _active() -> list[tuple[Autocast, _Context]]:
    found: list[tuple[Autocast, _Context]] | None = getattr(_entered, "stack", None)
    if found is None:
        found = _entered.stack = []
    return found


def active_autocast() -> Autocast | None:
    """The innermost :class:`Autocast` that this thread has entered, or None."""
    if _traced:
        return _traced[-1]
    entries = _active()
    return entries[-1][0] if entries else None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output or a batch, through nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


class ForwardWatch:
    """A forward hook of the model and its children that checks for the policy's context.

    The output of a forward outside the context gets a tensor hook that refuses gradients of
    ``Precision.backward``. So a forward that is never trained on may run anywhere.
    """

    __name__ = "ForwardWatch"  # torch.export asks every hook for one

    def __init__(
        self, policy: PrecisionPolicy, device: torch.device, owner: Callable[[], object]
    ) -> None:
        self._policy = policy
        self._device = device
        self.owner = owner  # a weak reference to the Precision
        self._needed = policy.compute_dtype != torch.float32 or policy.tf32

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Watch a model and its children: a method other than ``forward`` may call the latter."""
        watched = {id(m): m for m in (model, *model.children())}
        return [module.register_forward_hook(self) for module in watched.values()]

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Refuse a ``torch.autocast`` of another format inside the policy's context."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if is_running(self._device):  # activation checkpointing recomputes it inside a backward
            return
        policy, kind = self._policy, self._device.type
        context, outer = active_autocast(), torch.is_autocast_enabled(kind)
        if context is not None and context.policy.compute_dtype == policy.compute_dtype:
            found = torch.get_autocast_dtype(kind)
            if outer and found != policy.compute_dtype:
                raise PrecisionError(
                    f"a torch.autocast to {dtype_name(found)} was on in the forward of "
                    f"{type(module).__name__}, inside precision.autocast() of policy {policy}, "
                    f"which computes in {dtype_name(policy.compute_dtype)}. Take that autocast "
                    "out, be it a context or a decorator of forward; enabled=False is allowed"
                )
        elif self._needed or outer:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._refuse_gradient)  # type: ignore[no-untyped-call]

    def _refuse_gradient(self, gradient: Tensor) -> None:
        if is_running(gradient.device):
            policy = self._policy
            form = "tf32" if policy.tf32 else dtype_name(policy.compute_dtype)
            raise PrecisionError(
                "the loss comes from a forward outside of precision.autocast(), which did not run "
                f"as policy {policy} says ({form}). Put forward and loss inside "
                "`with precision.autocast():`"
            )


# Pins of process-wide switches that let fp32 matmuls round their operands to tf32 or bf16.
#
# Where they contradict the policy, they are set while a context or backward is open. Threads may
# hold the same value side by side; a thread that needs another one meanwhile is refused.

Switch = tuple[str, str]
SWITCHES: dict[str, tuple[Switch, ...]] = {
    device: tuple((backend, what) for what in ("matmul", "conv", "rnn"))
    for device, backend in (("cpu", "mkldnn"), ("cuda", "cuda"))
}
setting_of = torch._C._get_fp32_precision_getter
_set = torch._C._set_fp32_precision_setter
MEANS = {"ieee": ("ieee", "none"), "tf32": ("tf32",)}
"""The settings of a switch that mean this rounding of the operands of fp32 matmuls."""
_User = tuple[str, int]
held_switches: dict[Switch, list[_User]] = {}
"""Of each held switch its values and whose threads': first the user's, last the one in force."""


@contextlib.contextmanager
def pinned(switches: tuple[Switch, ...], value: str) -> Iterator[None]:
    """The context that holds switches at ``"ieee"`` or ``"tf32"``.

    Raises:
        PrecisionError: At entry, where another thread holds a switch at another value.
    """
    mine = value, threading.get_ident()
    with _lock:
        for switch in switches:
            for other, thread in held_switches.get(switch, [])[1:]:
                if other != value and thread != mine[1]:
                    raise PrecisionError(
                        f"fp32 matmuls cannot round by {value} here: another thread runs a policy "
                        f"that rounds them by {other}, and torch has one switch for all threads. "
                        "Run the two policies one after the other."
                    )
        for switch in switches:
            # set back to "none", which inherits, where it is as its parent
            own, above = setting_of(*switch), setting_of(switch[0], "all")
            users = held_switches.setdefault(switch, [("none" if own == above else own, 0)])
            users.append(mine)
            _set(*switch, value)
    try:
        yield
    finally:
        with _lock:
            for switch in switches:
                held = held_switches[switch]
                held.remove(mine)  # not always the last: a generator may leave late
                _set(*switch, held[-1][0])
                if len(held) == 1:
                    del held_switches[switch]


_lock = threading.Lock()


# Products of 16 bits on a CPU without instructions for them, by fp32 products.
#
# torch multiplies fp16 matrices on most CPUs with scalar code, and bf16 ones too where the
# processor has no bf16 instructions. A simulated product converts its operands to fp32 (exactly),
# runs the fp32 kernel, and rounds the result once to 16 bits. A tensor core does the same: 16-bit
# operands, exact products, fp32 accumulation, one rounding. So fp16 overflows to inf at 65520 and
# is 0 below 2^-25; only the order of fp32 additions differs from torch's own kernel. The fp32
# kernel of attention, besides, does not round the softmax probabilities between its two products.

_aten = torch.ops.aten

# Operators whose 16-bit CPU kernels are scalar. Their floating outputs have the operands' dtype,
# except attention's log-sum-exp (output 1), which must stay fp32 for the backward.
_PRODUCTS = frozenset(
    {
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
        *(_aten.addbmm.default, _aten._trilinear.default, _aten.mv.default, _aten.addmv.default),
        *(_aten.dot.default, _aten.vdot.default, _aten.addr.default, _aten._grouped_mm.default),
        *(_aten.convolution.default, _aten.convolution_backward.default),
        # Fused layers of torch.nn: they run wholly in fp32 and are rounded at their end.
        _aten._native_multi_head_attention.default,
        _aten._transformer_encoder_layer_fwd.default,
        *(_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default),
    }
)
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_REROUTED = _PRODUCTS | {
    _ATTENTION,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


def _holds(value: object, dtype: torch.dtype) -> bool:
    if isinstance(value, list | tuple):  # the operands of einsum
        return any(_holds(item, dtype) for item in value)
    return isinstance(value, Tensor) and value.dtype == dtype and value.device.type == "cpu"


@cache
def _may_multiply(func: Any) -> bool:
    """Whether an operator's kernel is to be replaced, or those of what it is composed of."""
    if func.namespace == "prim":  # a query such as a tensor's device, which runs no kernel
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return func in _REROUTED or bool(func.has_kernel_for_dispatch_key(composite))


class SimulatedProducts(TorchDispatchMode):
    """Reroute 16-bit CPU products through fp32 kernels while the mode is entered.

    It is below autograd and autocast, so it must be entered around the forward and the backward.
    Re-entrant; tensors on other devices and of other dtypes are untouched.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Example:
        >>> a, b = torch.full((1, 2), 256.0).half(), torch.full((2, 1), 256.0).half()
        >>> with SimulatedProducts(torch.float16):
        ...     print((a @ b).item())
        inf
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if NestedTensor in types:
            return NotImplemented  # its class has kernels, whose products come here again
        # the casting modes have already seen this call; what it runs is not the model's own call
        with torch._C.DisableTorchFunction():
            if _may_multiply(func):
                return self.run(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))  # nearly all

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, through fp32 if it is a 16-bit product."""
        low = self.dtype
        if not any(_holds(arg, low) for arg in args):
            return func(*args, **kwargs)
        floating = (a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point())
        if func in _PRODUCTS and any(dtype != low for dtype in floating):
            return func(*args, **kwargs)  # torch refuses operands of two dtypes, here too
        if func not in _REROUTED:
            if any(isinstance(arg, Tensor) and arg.is_nested for arg in args):
                return func(*args, **kwargs)  # a kernel of its own, which is no composite
            # Without gradients a composite such as linear arrives whole, so decompose it.
            with self:
                parts = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if parts is NotImplemented else parts
        return self.in_fp32(func, args, kwargs)

    def in_fp32(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a product by an fp32 kernel; a trace and a first cause know it by this frame."""
        wide, named = mapped((args, kwargs), lambda t: t.float() if t.dtype == self.dtype else t)
        result = func(*wide, **named)
        if func is _ATTENTION:
            return (result[0].to(self.dtype), *result[1:])
        return mapped(result, lambda t: t.to(self.dtype) if t.dtype == torch.float32 else t)
