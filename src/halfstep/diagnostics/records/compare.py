"""Says where two recorded runs part: the first operation that no rounding explains, and why.

An operation differs when its results are further apart than eight times what its formats or its
operands explain; or when something that decides it differs, as a weight, an option or a mask does,
and its result with it. Only what the records prove is named as a cause.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.diagnostics.records import recorded
from halfstep.diagnostics.records.recorded import Apart, Recorded, Row, Step, align, apart, plain
from halfstep.diagnostics.records.rounding import FACTOR, FP32, amplified, cancels, unit_of
from halfstep.diagnostics.trace import is_product
from halfstep.errors import DataError
from halfstep.shown import Finding

_RANDOM = {"bernoulli", "dropout", "rand", "randn", "normal", "uniform", "exponential", "rrelu"}
_ACTIVATIONS = {"gelu", "relu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "mish"}
# Options that say how to compute, or how large the batch is.
_HOW = {"half_to_float", "dtype", "layout", "device", "memory_format", "output_mask", "size", "dim",
        "non_blocking", "benchmark", "deterministic", "cudnn_enabled", "enable_gqa", "generator",
        "stride", "split_size"}  # fmt: skip
_CAUSES = {"causal": "mask", "mask": "mask", "diagonal": "mask", "eps": "eps", "dropout": "dropout",
           "approximate": "activation", "scal": "scale", "training": "training flag",
           "ignore_index": "labels", "slope": "activation", "target": "labels",
           "label": "labels", "condition": "mask", "position": "positions"}  # fmt: skip
_OF_OPERANDS = {"weight", "buffer", "tied weights", "data", "data order", "labels", "constant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first operation at which two runs part.

    Attributes:
        step: Number of the step.
        module: Its name in the first record; "" for the model itself, or outside of it.
        class_name: The module's class.
        operation: Such as ``addmm``; that of the record that has it.
        direction: ``"forward"``, ``"backward"`` or ``"update"``.
        relative: Distance of the two results, relative to the larger.
        allowed: What rounding may make of it.
        before: Whether what it reads is ``"equal in bits"`` or ``"close"``.
    """

    step: int
    module: str
    class_name: str
    operation: str
    direction: str
    relative: float
    allowed: float
    before: str

    def __str__(self) -> str:
        where = f"{self.module or 'the model'}{f' ({self.class_name})' * bool(self.class_name)}"
        return (
            f"step {self.step}, {self.direction} of {where}, {self.operation}: {self.relative:.1e} "
            f"apart, rounding explains {self.allowed:.1e}; what it reads is {self.before}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What :func:`compare` found.

    Attributes:
        names: Of the two records.
        aligned: Numbers of steps, modules and operations that both records have.
        noise: The largest distance that was taken for rounding, forward and backward, and whether
            it was ``"measured"`` or is of the ``"formats"``.
        first: The first operation at which the runs part; None if rounding explains all.
        cause: Its likely cause in a word, such as ``"mask"``; empty where none is proved.
        evidence: What proves it.
        findings: All that is to be said, the difference first.
    """

    names: tuple[str, str]
    aligned: Mapping[str, int]
    noise: Mapping[str, Any]
    first: First | None
    cause: str
    evidence: str
    findings: tuple[Finding, ...]

    @property
    def found(self) -> bool:
        """Whether the runs differ by more than rounding explains."""
        return self.first is not None

    def as_json(self) -> dict[str, Any]:
        """The same as values that JSON has."""
        return asdict(self)

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {what}" for what, n in self.aligned.items())
        lines = [f"{self.names[0]} and {self.names[1]}: {counts} aligned", *map(str, self.findings)]
        if not self.found:
            most = [f"{self.noise[way]:.1e} in the {way}" for way in ("forward", "backward")]
            lines.append(f"no difference beyond rounding: at most {' and '.join(most)}")
        return "\n".join(lines)


class _Proof(NamedTuple):
    """Something that differs, and decides what an operation computes."""

    cause: str = ""
    text: str = ""


def compare(a: str | Path, b: str | Path, *, floor: Sequence[str | Path] = ()) -> Comparison:
    """Find the first operation at which two recorded runs part, and why.

    Records are aligned by steps, names of parameters and modules, samples and ranks, whatever
    their formats and layouts are. A difference that the formats explain is none.

    Args:
        a: The folder of a record of :func:`halfstep.record`, or of a run that has one.
        b: That of the other.
        floor: Records of runs that are known to be as good as ``a``, with other threads, another
            order of samples or another seed: an operation of ``b`` may be three times as far from
            ``a`` as it is there.

    Raises:
        DataError: If a folder holds no record, is damaged, or of another model.
    """
    first, second = Recorded(a), Recorded(b)
    measured: dict[tuple[str, str, str], float] = defaultdict(float)
    for folder in floor:
        pair = _Pair(first, Recorded(folder), {})
        for row, _, found in (each for n in pair.numbers for each in pair.steps(n).rows()):
            key = (row.module, row.direction, row.op)
            measured[key] = max(measured[key], found.relative)
    return _Pair(first, second, measured).compared()


class _Pair:
    """The steps that two records share, and what is counted and noted over all of them."""

    def __init__(
        self, a: Recorded, b: Recorded, floor: Mapping[tuple[str, str, str], float]
    ) -> None:
        self.a, self.b, self.floor = a, b, floor
        self.numbers = sorted(a.steps.keys() & b.steps.keys())
        if not self.numbers:
            spans = [f"{r.name} has {min(r.steps)} to {max(r.steps)}" for r in (a, b)]
            raise DataError(f"no step is in both records: {', '.join(spans)}; record the same ones")
        self.aligned = {"steps": len(self.numbers), "modules": 0, "operations": 0}
        self.largest = {"forward": 0.0, "backward": 0.0}
        self.notes: list[Finding] = []

    def steps(self, number: int) -> _Steps:
        """Read one step of both."""
        return _Steps(self, self.a.step(number), self.b.step(number), number)

    def note(self, name: str, what: str, do: str = "") -> None:
        """Say something once that is no difference."""
        note = Finding(level="note", name=name, what=what, do=do)
        self.notes += [note] * (note not in self.notes)

    def compared(self) -> Comparison:
        """Compare step after step, until one differs."""
        found = next(filter(None, (self.steps(n).difference() for n in self.numbers)), None)
        first, proof = found or (None, _Proof())
        findings = self.notes
        if first is not None:
            difference = Finding(
                level="fault",
                name=proof.cause.replace(" ", "_") or "differs",
                what=f"{first}" + f"; {proof.text}" * bool(proof.text),
                do="give both the same, and compare again: what follows it differs by this",
                where=(f"{first.module or 'the model'}: {first.operation}",),
                values={"step": first.step, "relative": first.relative, "allowed": first.allowed},
            )
            findings = [difference, *findings]
        return Comparison(
            names=(self.a.name, self.b.name),
            aligned=self.aligned,
            noise={**self.largest, "source": "measured" if self.floor else "formats"},
            first=first,
            cause=proof.cause,
            evidence=proof.text,
            findings=tuple(findings),
        )


class _Steps:
    """A step that both records have, with its operations paired."""

    def __init__(self, pair: _Pair, a: Step, b: Step, number: int) -> None:
        self.pair, self.a, self.b, self.number = pair, a, b, number
        self.who = pair.a.name, pair.b.name
        recorded.require_one_model(pair.a, pair.b, (a, b))
        self.pairs = dict(align(a.parts[0].rows, b.parts[0].rows))
        self.partner = self.pairs | {y: x for x, y in self.pairs.items()}
        pair.aligned["operations"] += len(self.pairs)
        pair.aligned["modules"] = len({x.module for x in self.pairs})
        self.order = recorded.order_of(a, b)
        self.same_layout = len(a.parts) == len(b.parts) and self.order is None
        self.modules, self.others = ({plain(m[0]): m for m in s.head["modules"]} for s in (a, b))
        self.apart: dict[Row, float] = {}  # by row of either side
        self.exact: set[Row] = set()  # equal in bits on both sides
        self.sources: dict[Row, list[tuple[Row, Row, Apart]]] = {}
        products = [(x, y) for x, y in self.pairs.items() if is_product(x.op)]
        same = sum(x.inputs[-1:] == y.inputs[-1:] for x, y in products)
        policies = {str(r.head.get("policy")) for r in (pair.a, pair.b)}
        self.alike = len(policies) == 1 and same >= 0.6 * len(products)
        ties = [{frozenset(map(plain, names)) for names in step.head["tied"]} for step in (a, b)]
        self.ties_differ = ties[0] != ties[1]

    # --- distances -------------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[Row, Row, Apart]]:
        """The pairs of operations, in the order of ``a``, with how far they are apart."""
        lead = self.a.parts[0].rows, self.b.parts[0].rows
        sides = [
            [dict(align(first, part.rows)) for part in step.parts[1:]]
            for first, step in zip(lead, (self.a, self.b), strict=True)
        ]
        for x in (row for row in lead[0] if row in self.pairs):
            y = self.pairs[x]
            left, right = ([r, *(m.get(r) for m in s)] for r, s in zip((x, y), sides, strict=True))
            found = apart(left, right, self.order)
            if found is not None:
                yield x, y, found

    def judged(self) -> Iterator[tuple[Row, Row, Apart, float, bool]]:
        """The pairs with what rounding explains, and whether what they read is equal in bits."""
        scales = self.b.head["scale"] / self.a.head["scale"]
        for x, y, found in self.rows():
            self.sources[x] = [*self._sources(x, y)]
            mine, theirs = self.read(x), self.read(y)
            # Other loss scales and layouts give a backward a factor.
            free = x.direction == "backward" and not (self.same_layout and scales == 1)
            if free and found.off_ratio < found.relative:
                found = replace(found, equal=False, relative=found.off_ratio, ratio=1.0)
            self._know(x, y, found)
            exact = mine[1] and theirs[1]
            yield x, y, found, self._allowed(x, y, found, max(mine[0], theirs[0]), exact), exact

    def read(self, row: Row) -> tuple[float, bool]:
        """How far apart is what an operation reads, and whether it is equal in bits."""
        for each in row.reads:
            if each not in self.apart:  # one side alone has it, or its samples cannot be found
                self.apart[each] = max(self.read(each)[0], unit_of(each)) if each.reads else 0.0
        worst = max((self.apart[each] for each in row.reads), default=0.0)
        return worst, all(each in self.exact for each in row.reads)

    def _know(self, x: Row, y: Row, found: Apart) -> None:
        self.apart[x] = self.apart[y] = found.relative
        if found.equal:
            self.exact |= {x, y}

    def _sources(self, x: Row, y: Row) -> Iterator[tuple[Row, Row, Apart]]:
        """The weights, inputs and constants that both operations of a pair read in one place."""
        for one, other in zip(x.reads, y.reads, strict=False):
            alike = one.op == other.op if one.kind == "constant" else one.kind == other.kind
            if len(x.reads) == len(y.reads) and one.kind and alike:
                weight = one.kind in ("parameter", "buffer")
                found = apart([one], [other], None if weight else self.order)
                if found is not None:
                    self._know(one, other, found)
                    yield one, other, found

    def _allowed(self, x: Row, y: Row, found: Apart, before: float, exact: bool) -> float:
        """The distance that formats, and what the operation reads, explain."""
        unit, room = unit_of(x, y), FACTOR
        if x.direction == "backward":  # which subtracts
            room *= 2 if exact else 8
        backward = x.direction == "backward"
        if ("loss" in x.op and (backward or not exact)) or (backward and cancels(x.op)):
            steady = abs(found.ratio - 1) > 0.02 and found.off_ratio < 0.2
            return max(room * max(before, unit), 0.0 if steady and x.sketch.size > 31 else 2.0)
        measured = self.pair.floor.get((x.module, x.direction, x.op), 0.0)
        return max(room * max(before * amplified(x, found), unit), 3 * measured)

    # --- decision --------------------------------------------------------------------------------

    def difference(self) -> tuple[First, _Proof] | None:
        """The first operation at which this step differs, or its gradients, or its update."""
        batch = self._batch()
        for x, y, found, allowed, exact in self.judged():
            if found.equal:
                continue
            proof = self._proof(x, y, found)
            if proof is not None and proof.cause == "draws":
                self.pair.note("dropout", f"{proof.text}; what follows it is not compared",
                               "record both with p = 0")  # fmt: skip
                return None
            if batch is not None and (proof is not None or found.relative > allowed):
                proof = batch
            # In another order or layout it may be the same numbers of samples that lie elsewhere.
            elsewhere = not self.same_layout and abs(found.ratio_of_norms - 1) < 0.25
            if proof is None and found.relative > allowed and not elsewhere:
                return self._unproved(x, y, found, allowed, exact)
            if proof is not None:
                proof = proof if proof.cause in _OF_OPERANDS else self._with_module(x, proof)
                return self._first(x, found, FACTOR * unit_of(x, y), exact), proof
            most = self.pair.largest if not elsewhere else {x.direction: 0.0}
            most[x.direction] = max(most[x.direction], found.relative)
        return self._gradients() or self._update()

    def _first(self, x: Row, found: Apart, allowed: float, exact: bool, op: str = "") -> First:
        way = {"gradient": "backward", "after": "update"}
        return First(
            step=self.number,
            module=x.module,
            class_name=self.modules.get(x.module, ["", ""])[1],
            operation=op or x.op,
            direction=way.get(x.direction.split()[0], x.direction),
            relative=found.relative,
            allowed=allowed,
            before="equal in bits" if exact else "close",
        )

    def _proof(self, x: Row, y: Row, found: Apart) -> _Proof | None:
        """What differs between two operations whose results do, and decides them."""
        for one, other, distance in self.sources[x] if x.direction == "forward" else ():
            if proof := self._operand(one, other, distance):
                return proof
        if proof := self._options(x, y) or self._integers(x, y):
            return proof
        if (x.op in _RANDOM or x.args.get("dropout_p")) and found.relative > 0.05:
            if x.outputs != y.outputs or not self.same_layout:
                return _Proof("draws", "other formats and layouts draw other random numbers")
            same = self.a.parts[0].random == self.b.parts[0].random
            states = "alike, and other numbers were drawn since" if same else "in other states"
            return _Proof("dropout seed", f"the generators began the step {states}")
        made = [(r.outputs, self.partner.get(r)) for r in x.reads if not r.kind]
        inherits = any(other is None or other.outputs != forms for forms, other in made)
        other_form = _forms(x) != _forms(y) and x.direction == "forward"
        if self.alike and other_form and not inherits:
            each = f"{_forms(x)} in {self.who[0]}, {_forms(y)} in {self.who[1]}"
            return _Proof("format", f"it computes in {each}")
        return None

    def _operand(self, one: Row, other: Row, found: Apart) -> _Proof | None:
        """A weight, buffer, input or constant that differs by more than its format rounds."""
        weight = one.kind in ("parameter", "buffer")
        comparable = self.number == self.pair.numbers[0] if weight else self.same_layout
        cast = one.outputs != other.outputs
        limit = 2 * unit_of(one, other) * cast
        limit = limit if weight else max(limit, FACTOR * FP32)
        if found.equal or not comparable or found.relative <= limit:
            return None
        text = f"{one.op} is {found.relative:.1e} apart before it"
        if weight:
            cause = "weight" if one.kind == "parameter" else "buffer"
            return _Proof("tied weights" if self.ties_differ else cause, text)
        return _Proof(
            _cause(one.op.partition(" ")[2], "constant" if one.kind == "constant" else "data"), text
        )

    def _options(self, x: Row, y: Row) -> _Proof | None:
        """An option of the operation that changes what it computes."""
        if x.direction == "backward" or not (x.module or "loss" in x.op):
            return None
        for name in sorted(({*x.args, *y.args}) - _HOW, key=lambda n: (_cause(n, "") == "", n)):
            mine, theirs = _option(x, name), _option(y, name)
            if mine == theirs or not (mine or theirs):  # what is left out is the default
                continue
            numbers = isinstance(mine, int | float) and isinstance(theirs, int | float)
            if numbers and math.isclose(mine, theirs, rel_tol=1e-5):
                continue
            if x.shape != y.shape and not isinstance(mine, bool | float | str):
                continue  # of the size of the batch
            cause = "dropout" if name in ("p", "dropout_p") else "option"
            cause = "scale" if x.op in ("mul", "div") else _cause(name, cause)
            return _Proof(cause, f"{name} is {mine} in {self.who[0]}, {theirs} in {self.who[1]}")
        return None

    def _integers(self, x: Row, y: Row) -> _Proof | None:
        """Masks, labels and indices that do not come of rounded numbers."""
        for name in sorted(x.ints.keys() & y.ints.keys()):
            # Each is the hash of all, and the sum of those of samples, which may come in any order.
            mine, theirs = (row.ints[name][not self.same_layout] for row in (x, y))
            if mine != theirs and (self.same_layout or len(self.a.parts) == len(self.b.parts) == 1):
                return _Proof(_cause(name, "indices"), f"what it reads as {name} is another")
        return None

    def _unproved(
        self, x: Row, y: Row, found: Apart, allowed: float, exact: bool
    ) -> tuple[First, _Proof]:
        """Name the first operation; what one side alone ran on the way to it comes before it."""
        sides = [sorted({*self._alone(row)}, key=lambda r: r.index) for row in (x, y)]
        row, proof = x, _Proof()
        if sides[0] or sides[1]:
            row = min(sides[0] or sides[1], key=lambda r: r.index)
            exact = self.read(row)[1]
            ops = [list(dict.fromkeys(r.op for r in side)) for side in sides]
            active = all(ops) and {*ops[0], *ops[1]} <= _ACTIVATIONS
            each = [", ".join(side[:6]) or "nothing" for side in ops]
            text = f"{self.who[0]} runs {each[0]} there, {self.who[1]} {each[1]}"
            proof = _Proof("activation" if active else "operation", text)
        elif found.off_ratio <= max(allowed, 1e-4) and abs(found.ratio - 1) > allowed:
            text = f"{self.who[1]}'s is {found.ratio:.4g} times {self.who[0]}'s"
            proof = _Proof("scale", text)
        return self._first(row, found, allowed, exact), self._with_module(row, proof)

    def _alone(self, row: Row, depth: int = 30) -> Iterator[Row]:
        """The operations that one side alone ran between an operation and what both ran."""
        for each in row.reads:
            if not each.kind and each not in self.partner and depth:
                if each.direction != "recomputed":
                    yield each
                yield from self._alone(each, depth - 1)

    def _with_module(self, row: Row, proof: _Proof) -> _Proof:
        """Add what differs in the attributes of the module."""
        mine, theirs = self.modules.get(row.module), self.others.get(row.module)
        if not (mine and theirs):
            return proof
        facts = [{**m[4], "training": m[3], "repr": m[2]} for m in (mine, theirs)]
        for key in (k for k in facts[0] if k in facts[1] and facts[0][k] != facts[1][k]):
            each = f"{key} is {facts[0][key]} in {self.who[0]}, {facts[1][key]} in {self.who[1]}"
            text = f"{proof.text}; " * bool(proof.text) + f"{row.module or 'the model'}.{each}"
            known = _cause(key, "dropout" if key == "p" else proof.cause or "option")
            return _Proof(
                known if proof.cause in ("", "operation", "option") else proof.cause, text
            )
        return proof

    def _batch(self) -> _Proof | None:
        """What of the batch differs, besides the order of the samples in it."""
        mine, theirs = recorded.samples_of(self.a), recorded.samples_of(self.b)
        for name in (n for n in mine if n in theirs):
            shared = Counter(mine[name]) & Counter(theirs[name])
            forms = [step.parts[0].batch.get(name, [""])[0] for step in (self.a, self.b)]
            if shared.total() == len(mine[name]) == len(theirs[name]) or forms[0] != forms[1]:
                continue  # in other formats it is compared as numbers
            text = f"{shared.total()} of {len(mine[name])} samples are the same in input {name}"
            new, cause = {*theirs[name]} - {*mine[name]}, _cause(name, "data")
            others = (n for n in self.pair.numbers if n != self.number and cause == "data")
            if any(new & {*recorded.samples_of(self.pair.a.step(n)).get(name, ())} for n in others):
                return _Proof("data order", f"{text}; others come in another step")
            return _Proof(cause, text)
        if self.order is not None and len(self.a.parts) == len(self.b.parts):
            self.pair.note("order", "the samples of a batch come in another order")
        return None

    # --- gradients and update --------------------------------------------------------------------

    def _weights(self, kind: str) -> Iterator[tuple[str, Row, Row, Apart]]:
        for key, x in self.a.weights.items():
            y = self.b.weights.get(key) if key[0] == kind else None
            found = apart([x], [y]) if y is not None else None
            if y is not None and found is not None:
                yield key[1], x, y, found

    def _gradients(self) -> tuple[First, _Proof] | None:
        """Compare finished gradients, each beside the norm of all: some are 0 but for rounding."""
        rows = [*self._weights("gradient")]
        units = [unit_of(x, y) for x, y in self.pairs.items()]
        norm = math.hypot(*(found.norm for *_, found in rows)) or 1.0
        bad = []
        for _, x, y, found in rows:
            size = max(found.norm, y.norm)
            room = 2 * FACTOR * max(*units, self.read(x)[0], self.read(y)[0])
            if found.relative * size > room * (size + 0.3 * norm) and not found.equal:
                bad.append((x, found, room))
        if not bad:
            return None
        x, found, room = bad[-1]
        op = next((r.op for r in x.reads if not r.kind), "gradient")
        proof = _Proof("", f"the gradients of {len(bad)} of {len(rows)} parameters differ")
        ratios = [f.ratio for *_, f in rows if f.norm > 0.03 * norm]
        if self.ties_differ:
            proof = _Proof("tied weights", "weights are tied in one of the two alone")
        elif len(bad) > 0.8 * len(rows) and max(ratios) - min(ratios) < 0.02 * abs(ratios[0]):
            x, op = replace(x, module=""), "gradients"
            text = f"all of {self.who[1]} are {ratios[0]:.4g} times those of {self.who[0]}"
            proof = _Proof("reduction", f"{text}: a sum for a mean, clipping, or another loss")
        return self._first(x, found, room, False, op), proof

    def _update(self) -> tuple[First, _Proof] | None:
        """Compare what the optimizer made of weights and gradients."""
        rows = [*self._weights("after")]
        moved = [(x, found) for _, x, _, found in rows if not found.equal]
        if not moved:
            return None
        first = self._first(*moved[0], 0.0, False, "step")
        if self.a.head["applied"] != self.b.head["applied"]:
            which = self.who[bool(self.a.head["applied"])]
            return first, _Proof("skipped step", f"{which} skips the step, the other takes it")
        for mine, theirs in zip(self.a.head["groups"], self.b.head["groups"], strict=False):
            for key in sorted(({*mine, *theirs}) - {"foreach", "fused", "capturable"}):
                if mine.get(key) != theirs.get(key):
                    each = f"{mine.get(key)} in {self.who[0]}, {theirs.get(key)} in {self.who[1]}"
                    return first, _Proof("optimizer", f"{key} is {each}")
        still = [[n for n, *_ in rows if step.still(n)] for step in (self.a, self.b)]
        side = len(still[1]) > len(still[0])
        text = f"{len(still[side])} of {len(rows)} weights do not move in {self.who[side]}"
        if len(still[side]) > len(still[not side]) + len(rows) // 2:
            return first, _Proof("lost update", text)
        for x, found, room in self._moved():
            text = "equal weights and gradients are moved otherwise"
            return self._first(x, found, room, True, "step"), _Proof("optimizer", text)
        return None

    def _moved(self) -> Iterator[tuple[Row, Apart, float]]:
        """The weights that equal gradients move otherwise from equal values, and how far apart."""
        same = {name for name, *_, found in self._weights("gradient") if found.equal}
        for name, x, y, _ in self._weights("after"):
            one, other = self.a.start(name), self.b.start(name)
            if name not in same or one is None or other is None or one.bits != other.bits:
                continue
            pairs = (x, one), (y, other)
            moves = [replace(row, sketch=row.sketch - start.sketch) for row, start in pairs]
            found = apart(moves[:1], moves[1:])
            room = 1e-2 + 2**-18 * x.norm / (max(move.norm for move in moves) or 1.0)
            if found is not None and x.outputs == y.outputs and found.relative > room:
                yield x, found, room


def _cause(name: str, other: str) -> str:
    return next((cause for word, cause in _CAUSES.items() if word in name.lower()), other)


def _forms(row: Row) -> str:
    return " -> ".join(dict.fromkeys((*row.inputs[-1:], *row.outputs)))


def _option(row: Row, name: str) -> Any:
    value = row.args.get(name)
    default = value is None and name == "scale" and row.op == "attention" and row.shape
    return row.shape[-1] ** -0.5 if default else value
