"""Reads the record of a run, and puts its operations beside those of another."""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from halfstep.diagnostics.records.recording import FORMAT, digest_of
from halfstep.diagnostics.records.sketch import fold
from halfstep.errors import DataError, HalfstepError
from halfstep.files import parse_json, read_json

_FILE = re.compile(r"step-(\d{8})\.r(\d+)\.safetensors")
_SMALL = {"add", "mul", "div", "sum", "neg", "copy", "clone"}
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(slots=True, eq=False)
class Row:
    """One operation, or a weight, buffer, input or constant that is a ``"source"``."""

    index: int
    direction: str
    module: str
    op: str
    inputs: list[str]
    outputs: list[str]
    args: dict[str, Any]
    reads: list[Row]
    ints: dict[str, list[int]]
    number: int
    samples: int  # of the batch that it is part of
    shape: list[int]
    sketch: np.ndarray
    bits: int

    @property
    def kind(self) -> str:
        """``"parameter"``, ``"buffer"``, ``"input"`` or ``"constant"``; "" if it was computed."""
        return self.op.split()[0] if self.direction == "source" else ""

    @property
    def norm(self) -> float:
        """About its 2-norm."""
        return float(np.linalg.norm(np.nan_to_num(self.sketch.astype(np.float64))))

    @property
    def size(self) -> int:
        """How many elements the whole result has, before it was sketched."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def by_sample(self) -> bool:
        """Whether its rows are samples for sure, and its sketch has one row for each."""
        other = self.samples > 1 and self.samples in self.shape[1:]
        return self.sketch.shape[0] == self.samples and not other


@dataclass(slots=True)
class Part:
    """One forward of the model in a step on one rank, and what belongs to it."""

    rows: list[Row]
    batch: Mapping[str, tuple[str, list[int]]]
    samples: int
    random: int


@dataclass(slots=True)
class Step:
    """A step of a run: the parts of its batch, and the weights; the first rank's facts."""

    head: dict[str, Any]
    parts: list[Part]
    weights: dict[tuple[str, str], Row] = field(default_factory=dict)

    def start(self, name: str) -> Row | None:
        """A weight before the update: its master, or as the forward read it."""
        return self.weights.get(("before", name)) or self.weights.get(("read", name))

    def still(self, name: str) -> bool:
        """Whether a weight with a gradient that is not 0 is as it was before the update."""
        before, after = self.start(name), self.weights.get(("after", name))
        gradient = self.weights.get(("gradient", name))
        if before is None or after is None or gradient is None or not gradient.sketch.any():
            return False
        return before.outputs == after.outputs and before.bits == after.bits


def plain(name: str) -> str:
    """A name without what wrappers put into it."""
    words = [word for word in name.split(".") if word not in _WRAPPERS]
    text = ".".join(words[1:] if words[:1] == ["module"] else words)
    return text.removeprefix("base_model.model.")


class Recorded:
    """The record in a folder, or in the ``record`` folder of a run."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.name = folder.name or str(folder)
        inside = folder / "record" / "record.json"
        self.folder = inside.parent if inside.is_file() else folder
        if not (self.folder / "record.json").is_file():
            raise DataError(
                f"{folder}: holds no record, as there is no record.json; halfstep.record(model, "
                f"{str(folder)!r}) writes one"
            )
        self.head = read_json(self.folder / "record.json")
        if self.head.get("format") != FORMAT:
            raise DataError(
                f"{self.folder / 'record.json'}: of format {self.head.get('format')!r:.20}; this "
                f"halfstep reads {FORMAT}. Compare with the halfstep that wrote it"
            )
        found: dict[int, list[Path]] = defaultdict(list)
        for path in sorted(self.folder.glob("step-*.safetensors")):
            if match := _FILE.fullmatch(path.name):
                found[int(match[1])].append(path)
        world = self.head.get("world")
        self.steps = {n: paths for n, paths in found.items() if len(paths) == world}
        if not self.steps:
            raise DataError(
                f"{self.folder}: holds no step of all {world!r:.20} ranks; record again"
            )

    def step(self, number: int) -> Step:
        """Read one step of all ranks.

        Raises:
            DataError: If a file is damaged.
        """
        steps = [_read(path) for path in self.steps[number]]
        step = steps[0]
        for other in steps[1:]:
            step.parts += other.parts
            for key, row in other.weights.items():
                if key not in step.weights:
                    step.weights[key] = row
                elif key[0].endswith(" part"):
                    held = step.weights[key]
                    held.sketch, held.bits = held.sketch + row.sketch, held.bits + row.bits
        step.weights = {(k.removesuffix(" part"), n): row for (k, n), row in step.weights.items()}
        return step


def _read(path: Path) -> Step:
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {key: file.get_tensor(key) for key in sorted(file.keys())}
            if digest_of(arrays) != (file.metadata() or {})["sha256"]:
                raise DataError(f"{path}: has changed since it was written; record again")
        return _parsed(parse_json(zlib.decompress(arrays["step"].tobytes()), path), arrays)
    except HalfstepError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError,
            OverflowError, MemoryError, zlib.error, RecursionError) as error:  # fmt: skip
        raise DataError(f"{path}: no step of a record, or damaged ({error!r:.80})") from error


def _parsed(head: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Step:
    start, rows = 0, list[Row]()
    passes = head["passes"] or [{"batch": {}, "samples": 0, "random": 0}]
    sizes = [each["samples"] or 1 for each in passes]
    hashes = arrays["hashes"].tolist()
    for i, (row, bits) in enumerate(zip(head.pop("rows"), arrays["bits"].tolist(), strict=True)):
        groups, width = row.pop("groups"), row.pop("width")
        numbers = arrays["sketches"][start : (start := start + groups * width)]
        row |= {"module": plain(row["module"]), "reads": [rows[r] for r in row["reads"]]}
        row |= {"ints": {k: hashes[h] for k, h in row["ints"].items()}}
        samples, sketch = sizes[row["number"]], numbers.reshape(groups, width)
        rows.append(Row(**row, index=i, samples=samples, sketch=sketch, bits=bits))
    parts = [Part([], each["batch"], each["samples"], each["random"]) for each in passes]
    step = Step(head, parts)
    for row in rows:
        if row.direction.split()[0] in ("before", "after", "gradient"):
            step.weights[row.direction, plain(row.op)] = row
            row.module = plain(row.op).rpartition(".")[0]
        else:
            parts[row.number].rows.append(row)
            if row.op.startswith("parameter "):
                step.weights.setdefault(("read", plain(row.op.split()[1])), row)
    return step


# --- alignment ------------------------------------------------------------------------------------


def require_one_model(a: Recorded, b: Recorded, steps: tuple[Step, Step]) -> None:
    """Refuse records whose models have less than a fifth of their parameters in common.

    Raises:
        DataError: Naming both.
    """
    names = [{(plain(n), *shape) for n, shape in step.head["parameters"]} for step in steps]
    same, most = len(names[0] & names[1]), max(map(len, names))
    if same * 5 < most:
        raise DataError(
            f"records of other models: {same} of {most} parameters in common ({a.name}: "
            f"{a.head.get('model')!s:.40}, {b.name}: {b.head.get('model')!s:.40}); record the same "
            "model twice"
        )


def align(a: Sequence[Row], b: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Pair the operations of each module in each direction, in order."""
    groups: dict[tuple[str, str], tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((a, b)):
        for row in rows:
            if row.direction in ("forward", "backward"):
                groups[row.module, row.direction][side].append(row)
    for (_, direction), (ours, others) in groups.items():
        left, right = (
            [f"{r.op} {len(r.shape)} {r.shape[1:][-1:]}" for r in side] for side in (ours, others)
        )
        if left == right:
            yield from zip(ours, others, strict=True)
            continue
        if direction == "backward":  # where gradients add up depends on formats
            ours, others = ([r for r in s if r.op not in _SMALL] for s in (ours, others))
            left, right = ([r.op for r in side] for side in (ours, others))
        for i, j, n in SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
            yield from zip(ours[i : i + n], others[j : j + n], strict=True)


def samples_of(step: Step) -> dict[str, list[int]]:
    """The hashes of each input's samples, of all parts."""
    found: dict[str, list[int]] = defaultdict(list)
    for part in step.parts:
        for name, (_, hashes) in part.batch.items():
            found[name] += hashes
    return found


def order_of(a: Step, b: Step) -> list[int] | None:
    """For each sample of ``a`` its number in ``b``; None where they are in the same order."""
    left, right = samples_of(a), samples_of(b)
    names = [name for name in left if len(left[name]) == len(right.get(name, ()))]
    keys = [[*zip(*(side[n] for n in names), strict=True)] for side in (left, right)]
    if keys[0] == keys[1] or Counter(keys[0]) != Counter(keys[1]):
        return None
    places: dict[Any, list[int]] = defaultdict(list)
    for i, key in reversed([*enumerate(keys[1])]):
        places[key].append(i)
    return [places[key].pop() for key in keys[0]]


# --- distances ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Apart:
    """How far two tensors are apart."""

    equal: bool  # in bits
    relative: float
    norm: float
    ratio_of_norms: float
    ratio: float  # of the second to the first
    off_ratio: float  # what remains of the distance without that ratio


def apart(
    parts_a: Sequence[Row | None], parts_b: Sequence[Row | None], order: Sequence[int] | None = None
) -> Apart | None:
    """Compare the parts of a tensor; None if some are missing, or they are not of one shape.

    ``order``: for each sample of ``a`` its number in ``b``.
    """
    a, b = ([row for row in parts if row is not None] for parts in (parts_a, parts_b))
    if len(a) < len(parts_a) or len(b) < len(parts_b):
        return None
    if sum(row.size for row in a) != sum(row.size for row in b):
        return None
    regrouped = order is not None or len(a) != len(b)
    by_sample = all(row.by_sample for row in (*a, *b))
    if len(a) != len(b) and not by_sample:
        return None
    width = min(row.sketch.shape[1] for row in (*a, *b))
    x, y = (np.concatenate([fold(row.sketch, width) for row in side]) for side in (a, b))
    if x.shape != y.shape:
        return None
    x, y = x.astype(np.float64), y.astype(np.float64)
    if order is not None and len(order) == len(y):
        # A table has no rows of samples, and a gradient is the sum over them.
        sums = [np.sum(np.split(side, len(rows)), 0) for side, rows in ((x, a), (y, b))]
        ways = [(x, y[list(order)]), (x, y), *([(sums[0], sums[1])] * (len(a) == len(b)))]
        x, y = min(ways, key=lambda way: float(np.linalg.norm(way[0] - way[1])))
    good = np.isfinite(x) & np.isfinite(y)
    off = float(np.mean(np.isfinite(x) != np.isfinite(y)))
    x, y = x[good], y[good]
    if regrouped and not by_sample and np.linalg.norm(x - y) > 1e-3 * np.linalg.norm(x):
        return None  # it has samples elsewhere, or none
    sizes = [float(np.linalg.norm(x)), float(np.linalg.norm(y))]
    most = max(sizes) or 1.0
    relative = max(float(np.linalg.norm(x - y)) / most, off)
    ratio = float(x @ y) / sizes[0] ** 2 if sizes[0] else 1.0
    left = float(np.linalg.norm(y - ratio * x)) / (sizes[1] or 1.0)
    bits = sum(row.bits for row in a) % 2**64 == sum(row.bits for row in b) % 2**64
    bits = bits and {row.outputs[0] for row in a} == {row.outputs[0] for row in b}
    norms = sizes[1] / (sizes[0] or 1.0)
    return Apart(bits and relative < 1e-6, relative, sizes[0], norms, ratio, left)
