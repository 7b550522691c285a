"""Records which operations a training step really ran, in which formats, and in which module.

A dispatch mode sees real kernels with real dtypes, below autograd and autocast. Three things it
would show as what they are made of are shown as what they mean: a 16-bit matmul that a CPU
simulates by fp32 is one matmul in 16 bits; a layer's matmul below 16 bits, with the rounding of
its operands, is one ``fprop``, ``dgrad`` or ``wgrad`` in its scheme; and halfstep's compiled
kernels, which step aside while any dispatch mode is on, are the operations that they stand for.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.diagnostics.module_calls import Location, ModuleCalls
from halfstep.diagnostics.nonfinite.operations import Operation as Known, floating, operation
from halfstep.precision.border import require, require_model
from halfstep.precision.casting.autocast import SimulatedProducts
from halfstep.precision.casting.op_table import OPS
from halfstep.precision.low_bit import linear
from halfstep.precision.low_bit.native import stays_bf16
from halfstep.precision.masters.local_part import storage_key
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.recipe import PRODUCTS, SCHEMES, Recipe
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision
from halfstep.shown import aligned

_LOW = ("bf16", "fp16")
_Key = tuple[str, str, str, str, tuple[str, ...], tuple[str, ...]]
_SIMULATED, _IN_FP32 = SimulatedProducts.run.__code__, SimulatedProducts.in_fp32.__code__
_BELOW_16 = (linear.run_product.__code__, linear.LowBitLinear.rounded.__code__)
_STEP, _BACKWARD = (inspect.unwrap(f).__code__ for f in (Precision.step, Precision.backward))
_FUNCTION = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_PRODUCTS = {*OPS["matmul"].names.split(), "attention", *PRODUCTS}
_PRODUCTS |= {"grouped_mm_fallback"}  # of transformers
_FP32 = {*(n for row in OPS.values() if row.mixed == "fp32" for n in row.names.split()), "cdist"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one module in one direction, in one combination of formats.

    Attributes:
        module: Qualified name; "" for the model itself, and outside of it.
        class_name: The module's class; "" outside of all modules.
        direction: ``"forward"``, ``"backward"`` or ``"update"`` (the check and the optimizer).
        op: Its name, such as ``addmm``, ``attention``, ``layer_norm`` or ``cast``; of a layer below
            16 bits ``fprop``, ``dgrad`` or ``wgrad``.
        inputs: Dtypes of its floating operands, weights included, in order; of a matmul below 16
            bits its scheme, and whether it ran native or simulated.
        outputs: Dtypes of its results, each once.
        calls: How often it ran.
    """

    module: str
    class_name: str
    direction: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: int

    def __str__(self) -> str:
        where = f"{self.direction} outside of modules"
        if self.class_name:
            where = f"{self.direction} of {self.module or 'the model'} ({self.class_name})"
        forms = f"{_short(self.inputs)} -> {_short(self.outputs)}"
        calls = "calls" if self.calls > 1 else "call"
        return f"{self.op} in {where}: {forms}, {self.calls} {calls}"


@dataclass(frozen=True, slots=True)
class Ran:
    """One operation that has run, as it is meant: a simulated matmul is one in 16 bits.

    Attributes:
        known: Facts about the operator.
        place: The module, and the node of a backward, that it belongs to.
        direction: ``"forward"``, ``"backward"`` or ``"update"``.
        op: Its name as the policies' table has it.
        inputs: Dtypes of its floating operands, or its scheme.
        outputs: Dtypes of its results, each once.
        given: Its floating operands.
        made: Its floating results.
        args: What it was called with, by position.
        kwargs: What it was called with, by name.
    """

    known: Known
    place: Location
    direction: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    given: Sequence[Tensor]
    made: Sequence[Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Tracker(TorchDispatchMode):
    """Sees each operation that makes floating values, and the module that it belongs to.

    What follows is told of it by :meth:`ran`; views, allocations and what only looks are not.
    """

    supports_higher_order_operators = True
    lists = False  # whether it sees what writes to lists of tensors, as optimizers do

    def __init__(self, model: nn.Module, modules: ModuleCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._modules = model, modules
        self._names: dict[int, tuple[str, bool]] = {}

    def __enter__(self) -> Self:
        for name, parameter in self._model.named_parameters():
            if not nn.parameter.is_lazy(parameter):
                self._names[storage_key(parameter)] = name, True
        self._modules.hook()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._modules.unhook()

    def ran(self, one: Ran) -> None:
        """Take one operation."""
        raise NotImplementedError

    def passed(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Take a step of a simulation, which only converts what it is given."""

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
        made = [*floating(args[0] if self.lists and result is None and args else result)]
        if not made:
            return result
        simulated, low, low_bit, updates = _frames()
        given = _unique([*args, *(kwargs[name] for name in kwargs if name != "out")])
        if simulated is not None and simulated is not func:
            self.passed(given, made)
            return result  # a conversion of its operands, or of its result
        if known.attention:  # its log-sum-exp is fp32, and the mask may be
            given, made = given[:3], made[:1]
        place = self._modules.place(self._names)
        direction: str = place.direction
        if direction == "forward" and not place.class_name and updates:
            direction = "update"
        op, inputs = _name(known.base, given, made), tuple(_form(t, low) for t in given)
        outputs = tuple(dict.fromkeys(_form(t, low) for t in made))
        if low_bit is not None:
            if not (is_product(op) or op.startswith("scaled_mm")):
                self.passed(given, made)
                return result  # it rounds operands
            op, inputs, outputs = _of_recipe(low_bit)
        self.ran(Ran(known, place, direction, op, inputs, outputs, given, made, args, kwargs))
        return result


class trace(Tracker):  # type: ignore[no-untyped-call]
    """Records what one training step runs; enter it around forward, backward and step.

    It slows the step, but changes no bit of it, except that dropout draws torch's masks where a
    compiled kernel of halfstep would draw its own, and that ``fp8-block`` matmuls are torch's.

    Args:
        model: The model whose modules are named. It has hooks until the context is left.
        precision: The :class:`halfstep.Precision` that trains it, with whose policy to compare.

    Attributes:
        operations: The operations, in the order in which they first ran; when the context is left.
        policy: The policy of the step; None without one.

    Raises:
        PrecisionError: If an argument is of another type.

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

    def __init__(self, model: nn.Module, precision: Precision | None = None) -> None:
        require_model(model, "trace(model)")
        super().__init__(model, ModuleCalls(model))
        if precision is not None:
            require(precision, Precision, "trace(precision)", "a halfstep.Precision, or None")
        self.policy = None if precision is None else precision.policy
        self.operations: tuple[Operation, ...] = ()
        self._calls: Counter[_Key] = Counter()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.operations = tuple(Operation(*key, n) for key, n in self._calls.items())

    def ran(self, one: Ran) -> None:
        """Count an operation."""
        place = one.place
        key = (place.module, place.class_name, one.direction, one.op, one.inputs, one.outputs)
        self._calls[key] += 1

    def __str__(self) -> str:
        """Operations by module, as aligned text."""
        head = ("module", "class", "direction", "operation", "inputs", "outputs", "calls")
        rows = [
            (
                *(row.module or ("." if row.class_name else "-"), row.class_name or "-"),
                *(row.direction, row.op, _short(row.inputs)),
                *(_short(row.outputs), str(row.calls)),
            )
            for row in self.operations
        ]
        return aligned([head, *rows], {6})

    def differences(self, policy: str | PrecisionPolicy | None = None) -> list[str]:
        """Where what ran differs from what the policy says of operations; empty if nowhere.

        Products (attention and convolutions included) must have operands in the policy's compute
        dtype, forward and backward, and the operations of the table's fp32 list fp32 operands,
        but in modules that a rule keeps in fp32. The matmuls of a linear layer with a recipe must
        have run in its schemes.

        Args:
            policy: The policy to compare with; None: that of the trace.

        Raises:
            PrecisionError: If there is no policy, or a rule matches nothing.
        """
        value = parse_policy(policy or self.policy)  # type: ignore[arg-type]  # or it is refused
        placed = place(value, self._model)
        kept = {p.name for p in placed.modules if p.fp32}
        recipes = {p.name: p.recipe for p in placed.low if not stays_bf16(p)}
        compute = dtype_name(value.compute_dtype)
        found: list[str] = []
        for row in self.operations:
            if row.direction == "update" or not row.inputs:
                continue
            recipe = recipes.get(row.module, Recipe())
            if row.op in PRODUCTS or (recipe and is_product(row.op)):
                want = getattr(recipe, row.op) if row.op in PRODUCTS else str(recipe)
                if row.inputs[0].split()[0] != want:
                    found.append(f"{row}; {value} says {want}")
                continue
            want = _wanted(row, value, "fp32" if row.module in kept else compute)
            inputs = row.inputs
            if row.op == "attention_backward":  # the log-sum-exp that it reads is fp32
                inputs = inputs[:4]
            elif row.op == "addmm":  # an fp32 sum may take up a product of 16 bits
                inputs = inputs[-2:]
            if want and any(form in ("fp32", *_LOW) and form != want for form in inputs):
                found.append(f"{row}; {value} says {want}")
        return found


def _wanted(row: Operation, policy: PrecisionPolicy, compute: str) -> str:
    """The dtype that operands of this operation should have; empty where the policy says none."""
    name = _without_pass(row.op)
    if name in _PRODUCTS:
        return compute
    if row.direction != "forward":
        return ""
    if policy.casts_per_op:
        return "fp32" if name in _FP32 else ""
    return "fp32" if name in OPS["loss"].names.split() else ""


def is_product(op: str) -> bool:
    """Whether an operation is a matmul, a convolution or attention, forward or backward."""
    return _without_pass(op) in _PRODUCTS


def _without_pass(op: str) -> str:
    return op.removesuffix("_backward").removesuffix("_forward")


def _short(forms: Sequence[str]) -> str:
    """Dtypes in order, a run of equal ones once with its length."""
    runs = [(form, len([*run])) for form, run in groupby(forms)]
    return ", ".join(form if n == 1 else f"{n} {form}" for form, n in runs) or "-"


def _frames() -> tuple[Any, torch.dtype | None, dict[str, Any] | None, bool]:
    """The simulated operation that this is part of, for which dtype it is in fp32, and more.

    That is the locals of a matmul below 16 bits, and whether this may update weights: a loss that
    is an autograd function has gradients off, too.
    """
    frame: FrameType | None = sys._getframe(2)
    simulated, low, low_bit, updates = None, None, None, None
    while frame is not None:
        if updates is None and frame.f_code in (_STEP, _BACKWARD, _FUNCTION):
            updates = frame.f_code is _STEP
        if low_bit is None and frame.f_code in _BELOW_16:
            low_bit = frame.f_locals
        if simulated is None and frame.f_code in (_SIMULATED, _IN_FP32):
            simulated = frame.f_locals["func"]
            low = frame.f_locals["self"].dtype if frame.f_code is _IN_FP32 else None
        frame = frame.f_back
    return simulated, low, low_bit, not torch.is_grad_enabled() if updates is None else updates


def _of_recipe(product: dict[str, Any]) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Name, inputs and outputs of a matmul that a recipe decides."""
    layer, name = product["layer"], product["product"]
    form = getattr(layer.recipe, name)
    if form in SCHEMES:
        form += " native" if form in layer.native else " simulated"
    return name, (form, form), ("bf16",)


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
