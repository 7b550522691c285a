"""Records which operations a training step really ran, in which formats, and in which module.

A dispatch mode sees real kernels with real dtypes, below autograd and autocast. Three things it
would show as what they are made of are shown as what they mean: a 16-bit product that a CPU
simulates by fp32 is one product in 16 bits; a layer's product below 16 bits, with the rounding of
its operands, is one ``fprop``, ``dgrad`` or ``wgrad`` in its scheme; and halfstep's compiled
kernels, which step aside while any dispatch mode is on, are the operations that they stand for.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from halfstep.diagnostics.module_calls import ModuleCalls
from halfstep.diagnostics.nonfinite.operations import floating, operation, storage_key, stored
from halfstep.diagnostics.trace.ran import Holding, Operation, Ran, is_product
from halfstep.precision.border import require, require_model
from halfstep.precision.casting import simulate
from halfstep.precision.low_bit import linear
from halfstep.precision.low_bit.native import why_not_native
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.recipe import SCHEMES
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision

_Key = tuple[str, str, str, str, tuple[str, ...], tuple[str, ...]]
_CODES = (torch.uint8, torch.int8, torch.int16)  # of 8-bit moments, and of remainders
_SIMULATED = simulate.SimulatedProducts.run.__code__
_PRODUCT = linear.run_product.__code__
_ROOT = Path(__file__).parents[2]
_UPDATES = (  # code that runs in a step's update, or in the check before it
    *(str(_ROOT / name) for name in ("optim", "precision/masters", "precision/scaling")),
    *(str(_ROOT / "precision" / f"{name}.py") for name in ("step", "recovery", "after_step")),
    str(Path(torch.__file__).parent / "optim"),
)


def trace(
    model: nn.Module,
    precision: Precision | None = None,
    *,
    policy: str | PrecisionPolicy | None = None,
) -> Trace:
    """Record what one training step runs; enter it around forward, backward and step.

    It slows the step, but changes no bit of it, except that dropout draws torch's masks where a
    compiled kernel of halfstep would draw its own, and that ``fp8-block`` products are torch's.

    Args:
        model: The model whose modules are named. It has hooks until the context is left.
        precision: The :class:`halfstep.Precision` that trains it, for masters and moments.
        policy: The policy to compare with; None: that of ``precision``.

    Returns:
        A context manager that gives a :class:`Ran`, complete when the context is left.

    Raises:
        PrecisionError: If an argument is of another type, or the policy is unknown.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> precision = Precision("bf16-mixed", model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with trace(model, precision) as ran:
        ...     with precision.autocast():
        ...         loss = model(torch.ones(3, 4)).float().mean()
        ...     _ = precision.step(loss)
        >>> print([row for row in ran.operations if row.op == "addmm"][0])
        addmm in forward of the model (Linear): 3 bf16 -> bf16, 1 call
        >>> ran.differences()
        []
    """
    require_model(model, "trace(model)")
    if precision is not None:
        require(precision, Precision, "trace(precision)", "a halfstep.Precision, or None")
    if policy is not None:
        named: PrecisionPolicy | None = parse_policy(policy)
    else:
        named = None if precision is None else precision.policy
    return Trace(model, precision, named)


class Trace(TorchDispatchMode):
    """The context manager that :func:`trace` returns."""

    supports_higher_order_operators = True

    def __init__(
        self, model: nn.Module, precision: Precision | None, policy: PrecisionPolicy | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._precision = precision
        self._modules = ModuleCalls(model)
        self._calls: Counter[_Key] = Counter()
        self._names: dict[int, tuple[str, bool]] = {}
        self._gradients: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self.ran = Ran(model, policy)

    def __enter__(self) -> Ran:
        for name, parameter in self._model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                continue
            self._names[storage_key(parameter)] = name, True
            if parameter.requires_grad:
                hook = self._received(name)
                added = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(added)
        self._modules.hook()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self.ran

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._modules.unhook()
        for handle in self._handles:
            handle.remove()
        self.ran.operations = tuple(Operation(*key, n) for key, n in self._calls.items())
        self.ran.holdings = tuple(self._holdings())

    def _received(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._gradients[name] = parameter.grad.detach()

        return hook

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = operation(func)
        if known.view or known.allocates or known.looks(result):
            return result
        simulated, low_bit, updates = _frames()
        low = None
        if simulated is not None:
            if simulated["func"] is not func:
                return result  # a conversion of its operands, or of its result
            low = simulated["self"].dtype if "wide" in simulated else None
        given, made = _unique([*args, *kwargs.values()]), [*floating(result)]
        if not made:
            return result
        if known.attention:  # its log-sum-exp is fp32, and the mask may be
            given, made = given[:3], made[:1]
        place = self._modules.place(self._names)
        direction: str = place.direction
        if updates and direction == "forward" and not place.class_name:
            direction = "update"
        op, inputs = _name(known.base, given, made), tuple(_form(t, low) for t in given)
        outputs = tuple(dict.fromkeys(_form(t, low) for t in made))
        if low_bit is not None:
            if not (is_product(op) or op.startswith("scaled_mm")):
                return result  # it rounds operands
            op, inputs, outputs = _of_recipe(low_bit)
        key = (place.module, place.class_name, direction, op, inputs, outputs)
        self._calls[key] += 1
        return result

    def _holdings(self) -> list[Holding]:
        """What is stored, by kind and format."""
        found: dict[tuple[str, str], list[Tensor]] = {}
        for kind, tensor in self._stored():
            numbers = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in _CODES
            if numbers and not nn.parameter.is_lazy(tensor):
                found.setdefault((kind, dtype_name(tensor.dtype)), []).append(tensor)
        return [
            Holding(kind, form, len(ts), sum(stored(t).nbytes for t in ts))
            for (kind, form), ts in found.items()
        ]

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        own = dict(self._model.named_parameters())
        for parameter in own.values():
            yield "weights" if parameter.requires_grad else "frozen weights", parameter
        for buffer in self._model.buffers():
            yield "buffers", buffer
        for gradient in self._gradients.values():
            yield "gradients", gradient
        if self._precision is None:
            return
        for name, tensor in self._precision.named_parameters().items():
            if tensor is not own.get(name):
                yield "masters", tensor
        for optimizer in self._precision.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim():
                        yield f"optimizer {key}", value


def _frames() -> tuple[dict[str, Any] | None, dict[str, Any] | None, bool]:
    """What the operation is a part of.

    Returns:
        The locals of the 16-bit simulation that runs, if any; those of a product of a layer below
        16 bits; and whether an update runs.
    """
    frame: FrameType | None = sys._getframe(2)
    simulated, low_bit, updates = None, None, False
    while frame is not None:
        code = frame.f_code
        if low_bit is None and code is _PRODUCT:
            low_bit = frame.f_locals
        if code is _SIMULATED and simulated is None:
            simulated = frame.f_locals
        if code.co_filename.startswith(_UPDATES) and code.co_name != "backward":
            updates = True
        frame = frame.f_back
    return simulated, low_bit, updates


def _of_recipe(product: dict[str, Any]) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Name, inputs and outputs of a product that a recipe decides."""
    name, a = product["product"], product["a"]
    form = getattr(product["recipe"], name)
    if form in SCHEMES:
        form += " simulated" if why_not_native(form, a.device) else " native"
    return name, (form, form), (dtype_name(a.dtype),)


def _name(base: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> str:
    """The operation's name as the policies' table has it."""
    if base in ("_to_copy", "to", "copy"):
        same = given and made and given[-1].dtype == made[0].dtype
        return "copy" if same else "cast"
    if "scaled_dot_product" in base:
        return "attention_backward" if base.endswith("backward") else "attention"
    return base.strip("_").removeprefix("native_")


def _unique(values: Sequence[Any]) -> list[Tensor]:
    """The floating tensors among the arguments; of a list of tensors one of each dtype."""
    found: list[Tensor] = []
    for value in values:
        tensors = [*floating(value)]
        if isinstance(value, list | tuple):
            tensors = [*{t.dtype: t for t in tensors}.values()]
        found += tensors
    return found


def _form(tensor: Tensor, low: torch.dtype | None) -> str:
    """The dtype of an operand; in a simulation fp32 stands for 16 bits."""
    return dtype_name(low if low is not None and tensor.dtype == torch.float32 else tensor.dtype)
