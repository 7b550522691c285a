"""What a traced step ran: as a table, as JSON, against its policy, and against a golden file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import nn

from halfstep.errors import PrecisionError
from halfstep.precision.casting.op_table import AUTOCAST, MIXED
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.recipe import PRODUCTS, Recipe
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.shown import aligned, as_html, bars

_KIND = {
    "weights": "weights",
    "frozen weights": "frozen weights",
    "buffers": "buffers",
    "gradients": "gradients",
    "masters": "masters",
    "optimizer": "optimizer {state}",
}

_LOW = ("bf16", "fp16")
_KINDS = ("weights", "frozen weights", "buffers", "gradients", "masters")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one module in one direction, in one combination of formats.

    Attributes:
        module: Qualified name; "" for the model itself, and outside of it.
        class_name: The module's class; "" outside of all modules.
        direction: ``"forward"``, ``"backward"`` or ``"update"`` (the check and the optimizer).
        op: Its name, such as ``addmm``, ``attention``, ``layer_norm`` or ``cast``; of a layer below
            16 bits ``fprop``, ``dgrad`` or ``wgrad``.
        inputs: Dtypes of its floating operands, weights included, in order; of a product below 16
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
class Holding:
    """Tensors of one kind and format that training keeps.

    Attributes:
        kind: ``"weights"``, ``"frozen weights"``, ``"buffers"``, ``"gradients"`` (as the backward
            left them), ``"masters"``, or ``"optimizer "`` and the name of a state, as a moment's.
        dtype: The stored dtype.
        tensors: Number of tensors.
        bytes: Their size on this process.
    """

    kind: str
    dtype: str
    tensors: int
    bytes: int


class Ran:
    """What a step ran and what is stored; :func:`halfstep.trace` fills it.

    Attributes:
        operations: The operations, in the order in which they first ran.
        holdings: What is stored, by kind and format.
        policy: The policy of the step; None without one.
    """

    def __init__(self, model: nn.Module, policy: PrecisionPolicy | None) -> None:
        self.operations: tuple[Operation, ...] = ()
        self.holdings: tuple[Holding, ...] = ()
        self.policy = policy
        self._model = model

    def table(self) -> str:
        """Operations by module, and what is stored, as aligned text."""
        head = (
            *("module", "class", "direction", "operation"),
            *("inputs", "outputs", "calls"),
        )
        rows = [
            (
                *(row.module or ("." if row.class_name else "-"), row.class_name or "-"),
                *(row.direction, row.op, _short(row.inputs)),
                *(_short(row.outputs), str(row.calls)),
            )
            for row in self.operations
        ]
        stored = [(_kind(h), h.dtype, str(h.tensors), f"{h.bytes:,}") for h in self.holdings]
        kept = "stored", "dtype", "tensors", "bytes"
        return f"{aligned([head, *rows])}\n\n{aligned([kept, *stored])}"

    def _repr_html_(self) -> str:
        stored: dict[str, dict[str, float]] = {}
        for holding in self.holdings:
            stored.setdefault(holding.kind, {})[holding.dtype] = holding.bytes / 1e6
        products: dict[str, dict[str, float]] = {}
        for row in self.operations:
            if is_product(row.op):
                calls = products.setdefault(f"products, {row.direction}", {})
                form = _short(row.inputs[:1])
                calls[form] = calls.get(form, 0) + row.calls
        figure = bars(products, "calls by dtype") + bars(stored, "MB stored by dtype")
        return as_html(str(self), figure)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> dict[str, Any]:
        """Operations and holdings as values that ``json.dumps`` writes."""
        return {
            "policy": None if self.policy is None else str(self.policy),
            "operations": json.loads(json.dumps([asdict(row) for row in self.operations])),
            "stored": [asdict(holding) for holding in self.holdings],
            "differences": [] if self.policy is None else self.differences(),
        }

    def differences(self, policy: str | PrecisionPolicy | None = None) -> list[str]:
        """Where what ran differs from what the policy says of operations; empty if nowhere.

        Products (attention and convolutions included) must have operands in the policy's compute
        dtype, forward and backward, and the operations of the table's fp32 list fp32 operands,
        but in modules that a rule keeps in fp32. The products of a linear layer with a recipe must
        have run in its schemes.

        Args:
            policy: The policy to compare with; None: that of the trace.

        Raises:
            PrecisionError: If there is no policy, or a rule matches nothing.
        """
        value = self.policy if policy is None else parse_policy(policy)
        if value is None:
            raise PrecisionError(
                "differences() needs a policy, as the trace was made without a Precision; allowed: "
                "differences('bf16-mixed')"
            )
        placed = place(value, self._model)
        kept = {p.name for p in placed.modules if p.fp32}
        recipes = {p.name: p.recipe for p in placed.low}
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
            if want and any(form in ("fp32", *_LOW) and form != want for form in inputs):
                found.append(f"{row}; {value} says {want}")
        return found

    def save(self, path: str | Path) -> None:
        """Write the JSON of the trace to a file, as a golden one for :meth:`check`."""
        text = json.dumps(self.to_json(), indent=1)
        Path(path).write_text(f"{text}\n", encoding="utf-8")

    def check(self, path: str | Path) -> None:
        """Require that the step ran as a golden file says, which :meth:`save` wrote.

        Raises:
            PrecisionError: If the file cannot be read, or something differs: with the lines that
                do, ``-`` for the file's and ``+`` for those of this step.
        """
        changed = self.changes(path)
        if changed:
            raise PrecisionError(
                f"what ran differs from {path} in {len(changed)} lines; where that is meant, write "
                "it anew by save() or halfstep trace --save:\n" + "\n".join(changed)
            )

    def changes(self, path: str | Path) -> list[str]:
        """The lines in which the step differs from a golden file; empty if in none.

        Raises:
            PrecisionError: If the file cannot be read.
        """
        try:
            before = _lines(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PrecisionError(
                f"check({str(path)!r}) cannot read a trace from it ({error!s:.80}); write one by "
                "save() or halfstep trace --save"
            ) from error
        lines = difflib.unified_diff(before, _lines(self.to_json()), n=0, lineterm="")
        return [line for line in lines if not line.startswith(("@@", "--- ", "+++ "))]


def _wanted(row: Operation, policy: PrecisionPolicy, compute: str) -> str:
    """The dtype that operands of this operation should have; empty where the policy says none."""
    name = _without_pass(row.op)
    if name in _products():
        return compute
    if row.direction != "forward":
        return ""
    if policy.casts_per_op:
        return "fp32" if name in AUTOCAST["fp32"] else ""
    return "fp32" if name in MIXED["loss"] else ""


def is_product(op: str) -> bool:
    """Whether an operation is a product, a convolution or attention, forward or backward."""
    return _without_pass(op) in _products()


def _without_pass(op: str) -> str:
    return op.removesuffix("_backward").removesuffix("_forward")


@cache
def _products() -> frozenset[str]:
    return frozenset([*AUTOCAST["half"], "attention", *PRODUCTS])


def _lines(table: dict[str, Any]) -> list[str]:
    """A trace as lines, for a diff that a reader understands."""
    rows = [Operation(**{**row, "inputs": tuple(row["inputs"]), "outputs": tuple(row["outputs"])})
            for row in table["operations"]]  # fmt: skip
    stored = [Holding(**holding) for holding in table["stored"]]
    return [
        f"policy {table['policy']}",
        *map(str, rows),
        *(f"{_kind(h)} in {h.dtype}: {h.tensors} tensors, {h.bytes:,} bytes" for h in stored),
    ]


def _short(forms: Sequence[str]) -> str:
    """Dtypes in order, a run of equal ones once with its length."""
    runs = [(form, len([*run])) for form, run in groupby(forms)]
    return ", ".join(form if n == 1 else f"{n} {form}" for form, n in runs) or "-"


def _kind(holding: Holding) -> str:
    """What kind of tensors is stored, in words; a state of an optimizer keeps its name."""
    kind = holding.kind
    if kind.startswith("optimizer "):
        return f"optimizer {kind.removeprefix('optimizer ')}"
    return _KIND[kind] if kind in _KINDS else kind
