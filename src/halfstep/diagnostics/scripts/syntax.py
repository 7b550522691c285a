"""A training script as its syntax tree shows it: calls with where they stand, casts and scalers.

Nothing of the script is imported or run. Names are followed within a file and by their spelling.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

Arm = tuple[int, str]
"""A branch: the identity of an ``if`` or ``match``, and which way it goes."""
_ENDS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FP16 = frozenset({"torch.float16", "torch.half", "float16", "half"})
_BF16 = frozenset({"torch.bfloat16", "bfloat16"})
_AUTOCAST = frozenset(
    {"torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast",
     "amp.autocast", "cuda.amp.autocast", "autocast", "torch.amp.autocast_mode.autocast"}
)  # fmt: skip
_SCALER_CLASSES = frozenset({"GradScaler", "ShardedGradScaler"})
_SCALER_ARGUMENTS = frozenset({"scaler", "grad_scaler", "amp_scaler"})


@dataclass(frozen=True, slots=True)
class Call:
    """A call, and where it stands.

    Attributes:
        node: The call.
        name: The function's dotted name, as ``torch.save`` or ``self.scaler.step``; empty for a
            call on something that is no name, where ``method`` still tells the last part.
        scope: Identity of the innermost function around it, or 0.
        arms: The branches that lead to it, within its function.
        loop: Identity of the innermost loop around it within its function, or 0.
        contexts: The expressions of the ``with`` blocks around it within its function.
        order: Its number in the order of reading.
    """

    node: ast.Call
    name: str
    scope: int
    arms: tuple[Arm, ...]
    loop: int
    contexts: tuple[ast.expr, ...]
    order: int

    @property
    def line(self) -> int:
        """The line of the function's name: of ``.backward()`` in a call over several lines."""
        end = getattr(self.node.func, "end_lineno", None)
        return end or self.node.lineno

    @property
    def method(self) -> str:
        """The last part of the name."""
        func = self.node.func
        return func.attr if isinstance(func, ast.Attribute) else self.name

    @property
    def receiver(self) -> str:
        """What the method is called on, as a dotted name; empty if that is no name."""
        func = self.node.func
        return dotted(func.value) if isinstance(func, ast.Attribute) else ""

    def excludes(self, other: Call) -> bool:
        """Whether the two stand in different branches of one ``if``, so that only one runs."""
        mine = dict(self.arms)
        return any(mine.get(branch, way) != way for branch, way in other.arms)


def dotted(node: ast.AST | None) -> str:
    """``torch.cuda.amp`` of such an expression; empty for anything but names and attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def last(name: str) -> str:
    """The part of a dotted name after its last dot."""
    return name.rpartition(".")[2]


def low_format(node: ast.AST | None) -> str:
    """``"fp16"`` or ``"bf16"`` for a dtype that is written out; empty for anything else."""
    name = dotted(node)
    return "fp16" if name in _FP16 else "bf16" if name in _BF16 else ""


def cast_of(node: ast.AST | None) -> str:
    """The 16-bit format to which a call casts what it is called on; empty if it does not."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    if node.func.attr in ("half", "bfloat16") and not node.args:
        return "fp16" if node.func.attr == "half" else "bf16"
    if node.func.attr in ("to", "type"):
        return next(filter(None, map(low_format, [*node.args, *values(node, "dtype")])), "")
    return ""


def values(call: ast.Call, *keys: str) -> list[ast.expr]:
    """The values of keyword arguments."""
    return [k.value for k in call.keywords if k.arg in keys]


def chain(node: ast.AST | None) -> Iterator[ast.Call]:
    """The calls of ``a(...).b(...).c(...)``, the last first."""
    while isinstance(node, ast.Call):
        yield node
        node = node.func.value if isinstance(node.func, ast.Attribute) else None


class Script:
    """A parsed script."""

    def __init__(self, source: str) -> None:
        """Parse the source.

        Raises:
            SyntaxError: If it is not Python.
        """
        self.source = source
        self.tree = ast.parse(source)
        self.calls: list[Call] = []
        self.assigned: list[tuple[str, ast.expr, int]] = []
        """Name, value and scope of each assignment to a name or an attribute."""
        self.arguments: set[str] = set()
        """The names of all functions' parameters."""
        self._block(self.tree.body, 0, (), 0, ())

    def _block(
        self,
        body: list[ast.stmt],
        scope: int,
        arms: tuple[Arm, ...],
        loop: int,
        contexts: tuple[ast.expr, ...],
    ) -> None:
        for statement in body:
            self._statement(statement, scope, arms, loop, contexts)
            # what follows "if a: ...; return" runs only in the other case
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], _ENDS):
                arms = (*arms, (id(statement), "else"))

    def _statement(
        self,
        node: ast.stmt,
        scope: int,
        arms: tuple[Arm, ...],
        loop: int,
        contexts: tuple[ast.expr, ...],
    ) -> None:
        here = (scope, arms, loop, contexts)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            self.arguments |= {argument.arg for argument in every}
            self._block(node.body, id(node), (), 0, ())
        elif isinstance(node, ast.ClassDef):
            self._block(node.body, scope, arms, 0, ())
        elif isinstance(node, ast.If):
            self._expression(node.test, *here)
            self._block(node.body, scope, (*arms, (id(node), "then")), loop, contexts)
            self._block(node.orelse, scope, (*arms, (id(node), "else")), loop, contexts)
        elif isinstance(node, _LOOPS):
            for part in (node.test,) if isinstance(node, ast.While) else (node.target, node.iter):
                self._expression(part, *here)
            self._block(node.body, scope, arms, id(node), contexts)
            self._block(node.orelse, scope, arms, loop, contexts)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._expression(item.context_expr, *here)
            inside = (*contexts, *(item.context_expr for item in node.items))
            self._block(node.body, scope, arms, loop, inside)
        elif isinstance(node, ast.Try):
            for block in (node.body, *(h.body for h in node.handlers), node.orelse, node.finalbody):
                self._block(block, *here)
        elif isinstance(node, ast.Match):
            self._expression(node.subject, *here)
            for number, case in enumerate(node.cases):
                self._block(case.body, scope, (*arms, (id(node), str(number))), loop, contexts)
        else:
            self._plain(node, here)

    def _plain(
        self, node: ast.stmt, here: tuple[int, tuple[Arm, ...], int, tuple[ast.expr, ...]]
    ) -> None:
        """Keep an assignment and the calls of a statement that has no block."""
        if isinstance(node, ast.Assign):
            names = [dotted(target) for target in node.targets]
            self.assigned += [(name, node.value, here[0]) for name in names if name]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assigned.append((dotted(node.target), node.value, here[0]))
        self._expression(node, *here)

    def _expression(
        self,
        node: ast.AST,
        scope: int,
        arms: tuple[Arm, ...],
        loop: int,
        contexts: tuple[ast.expr, ...],
    ) -> None:
        if isinstance(node, ast.IfExp):
            self._expression(node.test, scope, arms, loop, contexts)
            for part, way in ((node.body, "then"), (node.orelse, "else")):
                self._expression(part, scope, (*arms, (id(node), way)), loop, contexts)
            return
        for child in ast.iter_child_nodes(node):  # what is inside of a call runs before it
            self._expression(child, scope, arms, loop, contexts)
        if isinstance(node, ast.Call):
            self.calls.append(
                Call(node, dotted(node.func), scope, arms, loop, contexts, len(self.calls))
            )

    @cached_property
    def made_scalers(self) -> set[str]:
        """Names that hold a loss scaler which this file makes."""
        return {name for name, value, _ in self.assigned if _makes_scaler(value)}

    @cached_property
    def scalers(self) -> set[str]:
        """Names that hold a loss scaler, also as a parameter or an attribute."""
        passed = _SCALER_ARGUMENTS & self.arguments
        known = {last(name) for name in self.made_scalers}
        used = {call.receiver for call in self.calls if call.method in ("scale", "step", "update")}
        return (
            self.made_scalers | passed | {n for n in used if last(n) in known | _SCALER_ARGUMENTS}
        )

    def on_scaler(self, method: str) -> list[Call]:
        """The calls of a method of a scaler, as ``step`` or ``unscale_``."""
        return [c for c in self.calls if c.method == method and c.receiver in self.scalers]

    @cached_property
    def scaler_leaves(self) -> bool:
        """Whether a scaler is handed to other code, of which this file cannot tell."""
        names = self.scalers
        for call in self.calls:
            handed = [*call.node.args, *(k.value for k in call.node.keywords)]
            if any(dotted(part) in names for value in handed for part in ast.walk(value)
                   if isinstance(part, ast.Name | ast.Attribute)
                   and not _is_receiver(part, value)):  # fmt: skip
                return True
        return any(
            isinstance(node, ast.Return) and dotted(node.value) in names
            for node in ast.walk(self.tree)
        )

    def is_autocast(self, node: ast.AST) -> bool:
        """Whether an expression is a ``torch.autocast`` that is not off, or a name for one."""
        if isinstance(node, ast.Call):
            off = [v for v in values(node, "enabled") if isinstance(v, ast.Constant)]
            return dotted(node.func) in _AUTOCAST and not any(not v.value for v in off)
        name = dotted(node)
        return bool(name) and any(
            target == name and any(self.is_autocast(part) for part in ast.walk(value)
                                   if isinstance(part, ast.Call))
            for target, value, _ in self.assigned
        )  # fmt: skip

    @cached_property
    def autocasts(self) -> list[Call]:
        """Every ``torch.autocast`` of the file that is not off."""
        return [call for call in self.calls if self.is_autocast(call.node)]

    def trained(self) -> Iterator[tuple[Call, str]]:
        """Each optimizer that is made, with a name whose ``parameters()`` it gets."""
        for call in self.calls:
            if not call.node.args or not _is_optimizer(call.name):
                continue
            for part in ast.walk(call.node.args[0]):
                if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
                    name = dotted(part.func.value)
                    if part.func.attr in ("parameters", "named_parameters") and name:
                        yield call, name

    def low_models(self) -> Iterator[tuple[str, str, int]]:
        """Models that are cast to 16 bits before an optimizer takes them: name, format, line."""
        for optimizer, name in self.trained():
            found = next(self._casts(name, optimizer), None)
            if found is not None:
                yield name, *found

    def _casts(self, name: str, optimizer: Call) -> Iterator[tuple[str, int]]:
        for call in self.calls:
            form = cast_of(call.node)
            together = call.scope == optimizer.scope and not call.excludes(optimizer)
            if form and call.receiver == name and together and call.order < optimizer.order:
                yield form, call.line
        for target, value, scope in self.assigned:
            before = value.lineno <= optimizer.node.lineno
            if target != name or scope != optimizer.scope or not before:
                continue
            for part in chain(value):
                loaded = map(low_format, values(part, "torch_dtype", "dtype"))
                if form := cast_of(part) or next(filter(None, loaded), ""):
                    yield form, part.lineno


def _is_optimizer(name: str) -> bool:
    short = last(name)
    known = {"SGD", "RMSprop", "Adagrad", "Adadelta", "LBFGS", "Lion", "Muon", "Adafactor"}
    return short in known or "Adam" in short


def _makes_scaler(value: ast.expr) -> bool:
    """Whether an expression makes a loss scaler that is not switched off for good."""
    for part in ast.walk(value):
        if isinstance(part, ast.Call) and last(dotted(part.func)) in _SCALER_CLASSES:
            off = [v for v in values(part, "enabled") if isinstance(v, ast.Constant)]
            return not any(v.value is False for v in off)
    return False


def _is_receiver(part: ast.AST, inside: ast.AST) -> bool:
    """Whether a name stands only before a dot in an expression, as in ``scaler.state_dict()``."""
    return any(isinstance(n, ast.Attribute) and n.value is part for n in ast.walk(inside))
