"""Forensics of a checkpoint: how it was trained and saved, by the bits of its numbers.

Each tensor is counted in one pass; rules look at the counts. Where bits leave room for a sound
cause, nothing is said, and what follows from what the folder declares is a note.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from halfstep.diagnostics.stored import DTYPES, Folder, Stored, read_folder
from halfstep.errors import CheckpointError
from halfstep.formats.floats import BF16, E4M3FN, E5M2, FORMATS, FP16, FP32, FloatFormat
from halfstep.precision.policy.spelling import parse_saved
from halfstep.shown import Finding, aligned, role

_FORMATS = {"F32": FP32, "BF16": BF16, "F16": FP16, "F8_E4M3": E4M3FN, "F8_E5M2": E5M2}
_KINDS = {
    "step": r"(^|\.)(steps?|global_step|num_batches_tracked|n_averaged|num_updates)$",
    "moment": r"(^|\.)(exp_avg\w*|max_exp_avg\w*|momentum_buffer|square_avg)$",
    "master": r"master|fp32_from|single_partition|fp32_flat|fp32_param",
    "average": r"(^|[.:])((\w+_)?ema(_\w+)?|averaged?|shadow(_\w+)?|swa(_\w+)?)([.:]|$)",
    "statistic": r"(^|\.)running_(mean|var)$",
    "scale": r"(^|[._])(scales?|scale_inv|scale_weight|absmax)$",
    "buffer": r"inv_freq|position_ids|rotary|rope|mask|\.buffer$|(^|\.)attn\.bias$|qmap",
}
"""Names of tensors, with dots for slashes, by what they are for; all others are weights."""
_NORM = r"^(?!.*(lora_|ia3_|layer_?scale|\bls\d|loss|criterion)).*\b(weight|scale|gamma|g)$"
_HEAD = r"(^|\.)(lm_head|output|embed_out|output_projection|decoder)\.weight$"
_EMBEDDING = r"(^|\.)(embed_tokens|wte|\w*word_embeddings|tok\w*_embeddings?|shared)\.weight$"
_ADAPTER = r"(lora_(A|B|up|down|E|embedding_[AB])|hada_w\d_[ab]|lokr_w\d|vera_lambda_b|ia3_l)\b"
_RELEASED = r"(hc_\w+|_hc\.\w+|attn_sinks?|compressor\.ape|e_score_correction_bias)$"
"""What releases of DeepSeek's family keep in fp32 (transformers, issue 46167)."""


# --- counts --------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Facts:
    """Counts of a tensor's elements.

    ``top`` are those at the format's largest magnitude, ``narrow`` is a 16-bit format that all are
    of though stored in fp32, ``plain`` says that they are too few different ones to tell a format
    by, and ``values`` are the numbers of a small vector.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    zeros: int = 0
    ones: int = 0
    subnormal: int = 0
    nans: int = 0
    infinite: int = 0
    top: int = 0
    below_top: int = 0
    narrow: str = ""
    plain: bool = True
    spread: float = 0.0
    kurtosis: float = 0.0
    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @property
    def low(self) -> str:
        return {"BF16": "bf16", "F16": "fp16"}.get(self.dtype, self.narrow)

    def distance(self, start: float, share: float = 0.5) -> float:
        """The distance from a start that a share of a small vector has at most, else 0."""
        return float(np.quantile(np.abs(self.values - start), share)) if self.values.size else 0.0


def _numbers(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    found: NDArray[np.float64] = torch.from_numpy(raw).view(DTYPES[dtype]).double().numpy()
    return found


def _patterns(form: FloatFormat, dtype: str) -> NDArray[np.float64]:
    """The numbers of all patterns of a format, of fp32 those of its upper halves."""
    codes = np.arange(1 << min(form.bits, 16), dtype=np.uint8 if form.bits == 8 else np.uint16)
    return _numbers(codes.view(np.uint8), "BF16" if form is FP32 else dtype)


_PATTERNS = {dtype: _patterns(form, dtype) for dtype, form in _FORMATS.items()}


def _count(stored: Stored) -> _Facts:
    """Read a tensor once, and count."""
    name, dtype = stored.name, stored.dtype
    kinds = (k for k, words in _KINDS.items() if re.search(words, name.replace("/", "."), re.I))
    kind = next(kinds, "weight" if DTYPES[dtype].is_floating_point else "buffer")
    found = _Facts(name, kind, dtype, stored.shape, math.prod(stored.shape))
    if dtype in _FORMATS:
        _count_patterns(found, stored, _FORMATS[dtype])
    if found.elements <= 1 << 16 and (len(stored.shape) < 2 or kind == "scale"):
        for raw in stored.chunks():
            found.values = _numbers(raw, dtype).copy()
            found.ones = int((found.values == 1).sum())
    return found


@np.errstate(all="ignore")  # the fourth powers of the largest overflow
def _count_patterns(found: _Facts, stored: Stored, form: FloatFormat) -> None:
    """Count by a histogram of all patterns, of fp32 by that of upper halves and by their rests."""
    known = _PATTERNS[stored.dtype]
    cells, rests = np.zeros(len(known), np.int64), np.zeros(4, np.int64)
    for raw in stored.chunks():
        upper = raw if form.bits == 8 else raw.view(np.uint16)
        if form is FP32:
            whole, lower, upper = raw.view(np.uint32), upper[::2], upper[1::2]
            bits = (lower, whole & 0x1FFF, whole << 1, whole ^ 0x3F800000)
            rests += [np.count_nonzero(each) for each in bits]
        cells += np.bincount(upper, minlength=len(cells))
    values, held = known[cells > 0], cells[cells > 0]
    size, edge = np.abs(values), form.max - form.ulp(form.max)
    found.zeros = int(held[size == 0].sum())
    found.ones = int(held[values == 1].sum())
    found.subnormal = int(held[(size > 0) & (size < form.min_normal)].sum())
    found.nans = int(held[np.isnan(values)].sum())
    found.infinite = int(held[np.isinf(values)].sum())
    found.top, found.below_top = (int(held[size == at].sum()) for at in (form.max, edge))
    found.plain = len(held) < 9
    finite = np.where(np.isfinite(values), values, 0.0)
    shares = held / max(found.elements, 1)
    centred = finite - finite @ shares
    found.spread = float((centred**2 @ shares) ** 0.5)
    found.kurtosis = float(centred**4 @ shares / found.spread**4) if found.spread else 0.0
    if form is FP32:
        in_16, in_19, zeros, ones = (found.elements - rests).tolist()
        halves = bool(((size == 0) | (size >= FP16.min_subnormal) & (size <= FP16.max)).all())
        fp16 = "fp16" if in_19 == found.elements and halves else ""
        found.narrow = "bf16" if in_16 == found.elements else fp16
        found.plain &= in_19 == found.elements
        found.subnormal += found.zeros - zeros
        found.zeros, found.ones = zeros, ones


# --- what rules look at --------------------------------------------------------------------------


class Pair(NamedTuple):
    """A tensor beside the base's: the share that differs, by how many ulps of which format."""

    name: str
    share: float
    median_ulps: float
    largest_ulps: float
    format: str


@dataclass
class _Evidence:
    read: Folder
    tensors: list[_Facts]
    pairs: Mapping[str, Pair]
    base: Mapping[str, str]
    """The dtypes of the base's tensors, by our names."""
    claimed: bool
    """Whether the folder claims that all states are in fp32."""

    def of(self, *kinds: str) -> list[_Facts]:
        return [each for each in self.tensors if each.kind in kinds]

    def said(self, key: str, file: str = "config") -> Any:
        """What a JSON file beside the tensors says, if it has the key."""
        return self.read.said.get(file, {}).get(key)

    @cached_property
    def weights(self) -> dict[str, _Facts]:
        return {_plain(each.name): each for each in self.of("weight")}

    @cached_property
    def low(self) -> str:
        """The 16-bit format that all weights are of, in whichever they are stored, or nothing."""
        formats = {each.low for each in self.of("weight") if not each.plain}
        return formats.pop() if len(formats) == 1 else ""

    @cached_property
    def states(self) -> dict[str, dict[str, _Facts]]:
        """The optimizer's tensors of each parameter, by its name or number."""
        found: dict[str, dict[str, _Facts]] = defaultdict(dict)
        for each in self.of("moment", "master"):
            owner, _, last = each.name.replace("/", ".").rpartition(".")
            found[_plain(re.sub(r"^.*?\bstate\.", "", owner))][last] = each
        return found

    @cached_property
    def steps(self) -> float:
        """How many steps the folder says were taken; 0 if it does not."""
        told = self.said("global_step", "trainer_state") or self.said("step", "state") or 0
        held = [each.distance(0) for each in self.of("step")]
        told = told if isinstance(told, int) else 0
        return float(max([told, *held, *self.read.said.get("steps", ())]))

    @np.errstate(all="ignore")
    def alike(self, one: _Facts, two: _Facts) -> float:
        """The correlation of two tensors around 0; 1 only if all numbers are equal."""
        a, b = self.read.tensors[one.name], self.read.tensors[two.name]
        equal, sums = one.shape == two.shape, np.zeros(3)
        for x, y in _both_numbers(a, b) if equal else ():
            equal &= np.array_equal(x, y)
            sums += [x @ x, y @ y, x @ y]
        size = math.sqrt(sums[0] * sums[1]) or 1.0
        return 1.0 if equal else min(float(sums[2]) / size, 1 - FP32.eps)


def _plain(name: str) -> str:
    """A parameter's name without those of wrappers."""
    name = re.sub(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|base_model)(?=\.)", "", name)
    return re.sub(r"^\.?((state_dict|model|app|\w*ema\w*|shadow\w*|averaged?)[.:])*", "", name)


def _block(name: str) -> str:
    """The layer or expert that a tensor is of: its name up to the last number."""
    return "".join(re.findall(r"^.*(?<![^./])\d+(?![^./])", name))


# --- rules: names of findings, and the tensors of each -------------------------------------------

_Found = Iterator[tuple[str, list[_Facts]]]


def _norms(e: _Evidence) -> _Found:
    """Norm weights that are 1 in every bit, with a proof that fp32 ones would have moved."""
    norms = [x for x in e.of("weight", "average") if x.values.size > 1 and re.match(_NORM, x.name)]
    own = {x.low for x in norms if x.dtype != "F32"}
    low = e.low or (own.pop() if len(own) == 1 else "")
    still = [each for each in norms if each.ones == each.elements]
    gone = [each for each in norms if each.ones < each.elements]
    proved = any(_has_moments(e, each) for each in still)
    gap = FORMATS[low].eps if low else math.inf  # fp32 norms that stand still may be frozen
    if not proved:
        others = np.median([each.distance(1.0) for each in gone] or [0.0])
        biases = any(_bias_moved(e, each, gap) for each in still)
        proved = biases or bool(others > 2 * gap) or bool(low and _matrices_moved(e, gap))
    atoms = [each for each in gone if low and _is_atom(each, gap)]
    if e.said("quantization_config") is None:  # else they are folded into what was rotated
        yield "norms_at_one", still * proved + atoms


def _bias_moved(e: _Evidence, each: _Facts, gap: float) -> bool:
    """Whether the norm's bias moved, which starts at 0, where 16-bit numbers are dense."""
    name = re.sub("gamma$", "beta", re.sub("(weight|scale)$", "bias", _plain(each.name)))
    return name in e.weights and e.weights[name].distance(0.0, 0.9) > gap


def _has_moments(e: _Evidence, each: _Facts) -> bool:
    """Whether a weight has moments in its own format, so that it is no copy of an fp32 one."""
    own = e.states.get(_plain(each.name))
    like = [x for x in e.weights.values() if x.shape == each.shape]
    states = [own] if own else [s for key, s in e.states.items() if key.isdigit()]
    moments = [s["exp_avg"] for s in states if "exp_avg" in s]
    moved = [x for x in moments if x.shape == each.shape and x.dtype == each.dtype and x.spread]
    return len(moved) >= (1 if own else len(like)) and e.steps >= 3 and not e.of("master")


def _matrices_moved(e: _Evidence, gap: float) -> bool:
    """Whether a third of the matrices is further from any usual start than norms would show."""
    start, moved = e.said("initializer_range"), 0
    large = [x for x in e.of("weight") if len(x.shape) == 2 and x.elements >= 1024]
    for each in large:
        chance = (2 / each.elements) ** 0.5
        heavy = each.kurtosis > 3.5 + 28 * chance  # starts are normal, or have less
        wide = isinstance(start, float) and start < each.spread < 2 * start  # else another start
        moved += heavy or (wide and each.spread**2 > start**2 * (1 + 5 * chance) + gap**2)
    return 0 < len(large) <= 3 * moved


def _is_atom(each: _Facts, gap: float) -> bool:
    """Whether entries are 1 far too often for numbers of a smooth law that were rounded once."""
    away = np.abs(each.values - 1.0)
    near, far = int((away <= gap).sum()) - each.ones, int((away >= 4 * gap).sum())
    many = each.ones >= max(each.elements / 2, 10 * near)
    return many and 2 * far > each.elements - each.ones


def _narrow(e: _Evidence) -> _Found:
    """Tensors of fewer bits than they are stored in, or than what is beside them."""
    wide = [x for x in e.of("weight") if x.dtype == "F32" and not x.plain]
    formats = {x.narrow for x in wide}
    sure = len(formats) == 1 and "" not in formats
    yield "narrow_values", [x for x in e.of("weight") if sure and x.narrow and x.spread]
    for kind in ("master", "moment"):  # the first moment may be a gradient, a first master a weight
        low = [x for x in e.of(kind) if x.narrow or (e.claimed and x.low)]
        yield f"{kind}s_narrow", [x for x in low if not x.plain and e.steps >= 3]
    for kind in ("statistic", "average"):
        low = [x for x in e.of(kind) if x.low and (not x.plain or x.dtype != "F32")]
        yield f"{kind}s_narrow", low if "" in formats else []
    pairs = [(s.get("exp_avg"), s.get("exp_avg_sq")) for s in e.states.values()]
    halves = [(x, y) for x, y in pairs if x and y and y.low == "fp16"]
    yield "moments_flushed", [y for x, y in halves if y.zeros - x.zeros > y.elements / 20]
    told = e.said("global_step", "trainer_state")
    rounded = torch.tensor(told if isinstance(told, int) else 0.0).bfloat16().item()
    wrong = bool(told) and all(x.distance(0) == rounded != told for x in e.of("step"))
    yield "steps_narrow", [x for x in e.of("step") if x.dtype in ("BF16", "F16") or wrong]


def _mixed(e: _Evidence) -> _Found:
    """Few layers of a role in 16 bits, of a layer that is else in fp32; or what a release has."""
    roles, blocks = defaultdict(list), defaultdict(list)
    for each in e.tensors:
        roles[role(each.name)].append(each.dtype)
        blocks[_block(each.name)].append(each.dtype)
    family = re.match("deepseek|glm4_moe", str(e.said("model_type")))
    mixed = len({*e.base.values()} & {"F32", "BF16", "F16"}) > 1
    found = []
    for each in [x for x in e.tensors if x.dtype in ("BF16", "F16")]:
        like = roles[role(each.name)]
        odd = 2 * like.count("F32") > len(like) and "F32" in blocks[_block(each.name)]
        released = mixed and e.base.get(each.name) == "F32"
        if odd or released or (family and re.search(_RELEASED, each.name)):
            found.append(each)
    yield "not_in_fp32", found


def _ranges(e: _Evidence) -> _Found:
    """Numbers beyond what a format holds, or of few of its bits."""
    masks = [x for x in e.of("buffer") if x.plain and not x.nans]
    yield "not_finite", [x for x in e.tensors if x.nans + x.infinite and x not in masks]
    most = {"F16": 0.1, "F32": 0.01, "BF16": 0.01}
    small = f"{_ADAPTER}|{_HEAD}|{_EMBEDDING}"  # rows of words that are never seen decay
    large = [x for x in e.of("weight") if len(x.shape) > 1 and not re.search(small, x.name)]
    low = [x for x in large if x.subnormal > most.get(x.dtype, 1) * (x.elements - x.zeros)]
    yield "subnormal", low
    scales: dict[str, list[_Facts]] = defaultdict(list)
    for each in e.of("scale"):
        if not re.search(r"input|act|[kvq]_scale", each.name):
            scales[each.name.rpartition(".")[0]].append(each)
    clipped, unscaled = [], []
    for each in [x for x in large if x.dtype in ("F8_E4M3", "F8_E5M2")]:
        beside = scales.get(each.name.rpartition(".")[0], []) + scales.get(each.name, [])
        own = [x for x in beside if x.name.startswith(each.name.removesuffix("weight"))]
        blocks = max(sum(scale.elements for scale in own), 1)  # each has one at the top
        if each.top > max(3 * each.below_top, 4 * blocks):
            clipped.append(each)
        ones = all(scale.ones == scale.elements for scale in own) and (own or not scales)
        if ones and each.subnormal > each.elements / 10:
            unscaled.append(each)
    yield "fp8_saturated", clipped
    yield "fp8_unscaled", unscaled


def _copies(e: _Evidence) -> _Found:
    """Adapters that add nothing, ties that parted, averages that are no averages."""
    parts = [x for x in e.of("weight") if re.search(_ADAPTER, x.name)]
    idle = [x for x in parts if (x.ones if "ia3_l" in x.name else x.zeros) == x.elements]
    if len({role(x.name) for x in parts} - {role(x.name) for x in idle}) > 1:
        idle = [x for x in idle if "experts." not in x.name]  # which get no tokens
    yield "adapter_zero", idle if e.said("global_step", "trainer_state") != 0 else []
    inner = e.said("text_config")
    own = inner if isinstance(inner, dict) else {}
    tied = own.get("tie_word_embeddings", e.said("tie_word_embeddings"))
    heads = [x for name, x in e.weights.items() if re.search(_HEAD, name) and tied is not False]
    for table in [x for name, x in e.weights.items() if re.search(_EMBEDDING, name)]:
        for head in [x for x in heads if x.shape == table.shape]:
            alike = e.alike(head, table)
            yield "tied_parted", [head, table] * (alike < 1 and (bool(tied) or alike > 0.99))
    names = {x: _plain(re.sub(r"[/.](ema|averaged?)$", "", x.name)) for x in e.of("average")}
    held = {x: e.weights[n] for x, n in names.items() if n in e.weights and not x.plain}
    alias = e.steps >= 10 and len(held) > 2 and all(e.alike(x, y) == 1 for x, y in held.items())
    yield "average_equal", [*held] * alias


def _still(e: _Evidence) -> _Found:
    """What equals the base beside its like: neither a whole role, nor all of a frozen layer."""
    weights = [x for x in e.of("weight") if x.name in e.pairs]
    still = [x for x in weights if not e.pairs[x.name].share]
    moved = {f(x.name) for x in weights if e.pairs[x.name].share for f in (role, _block)}
    vectors = [x for x in weights if len(x.shape) < 2]
    norms = [x for x in vectors if re.match(_NORM, x.name)]
    if still not in (weights, vectors, norms):  # these alone, and embeddings moved: no adapter
        still = [x for x in still if {role(x.name), _block(x.name)} <= moved]
    yield "equal_to_base", still


_MASTERS = "train with fp32 masters: bf16-split, bf16-master, or fp32 weights under autocast"
_KEEP = "keep them in fp32 when the model is converted, saved and loaded"
_SCALES = "quantize again: scale = largest magnitude / the format's largest number"
_TEXTS = {
    "not_finite": ("hold NaN or infinity", "go back to an earlier checkpoint"),
    "norms_at_one": ("of norms are 1.0 in every bit of all or most entries, while others moved: "
                     "16-bit weights lost their updates (or they were folded)", _MASTERS),
    "narrow_values": ("of fp32 hold 16-bit numbers only: no masters", _MASTERS),
    "masters_narrow": ("of masters hold 16-bit numbers only", _MASTERS),
    "moments_narrow": ("of moments hold 16-bit numbers only", _KEEP),
    "statistics_narrow": ("of statistics are rounded to 16 bits", _KEEP),
    "averages_narrow": ("of an average are rounded to 16 bits", _KEEP),
    "moments_flushed": ("of second moments are 0 in fp16 where the first are not", _KEEP),
    "steps_narrow": ("count steps in 16 bits: bf16 stands still at 256", _KEEP),
    "not_in_fp32": ("have 16 bits, where the release or their like has 32", _KEEP),
    "subnormal": ("hold subnormal numbers, of fewer bits", "save them in bf16 or fp32"),
    "fp8_saturated": ("of fp8 are cut off at its largest number", _SCALES),
    "fp8_unscaled": ("of fp8 have scales of 1, and a tenth is subnormal", _SCALES),
    "adapter_zero": ("of an adapter add nothing, as before the first step", "check that the "
                     "optimizer has them, and that the trained model is saved"),
    "tied_parted": ("should be one tensor, and differ", "save one, and tie the other to it"),
    "average_equal": ("of an average equal the weights", "average a copy of them"),
    "equal_to_base": ("equal the base in every bit", f"check that they are trained; {_MASTERS}"),
}  # fmt: skip
_COUNTED = {
    "not_finite": ("nans", "infinite"), "norms_at_one": ("ones",), "subnormal": ("subnormal",),
    "fp8_saturated": ("top",), "fp8_unscaled": ("subnormal",),
}  # fmt: skip
"""Elements that show a finding, where not all of its tensors do."""
_NO_MASTERS = {"norms_at_one", "narrow_values", "moments_narrow", "moments_flushed", "subnormal"}


def _findings(e: _Evidence, declared: set[str]) -> Iterator[Finding]:
    for rules in (_ranges, _norms, _narrow, _mixed, _copies, _still):
        for name, tensors in rules(e):
            where, (what, do) = tuple(sorted(each.name for each in tensors)), _TEXTS[name]
            level: Any = "fault" if name == "not_finite" else "warning"
            level = "note" if name in declared else level
            counts = _COUNTED.get(name, ("elements",))
            counted = sum(getattr(each, key) for each in tensors for key in counts)
            share = counted / max(sum(x.elements for x in tensors), 1)
            part = f" ({share:.2%} of their elements)" * (share < 1)
            what = f"{len(where)} tensor{'s' * (len(where) > 1)}{part} {what}"
            values = {"tensors": len(where), "of": len(e.tensors), "share": share}
            if where:
                yield Finding(level=level, name=name, what=what, do=do, where=where, values=values)


# --- the command ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Xray:
    """What the bits of a checkpoint prove.

    Attributes:
        folder: What was read.
        dtypes: How many tensors of each dtype, by safetensors' names.
        declared: The precision policy that the folder names, or empty.
        findings: Faults, warnings and notes, each with all of its tensors.
        moved: Tensors that differ from the base's, those first of which the most does.
    """

    folder: Path
    dtypes: Mapping[str, int]
    declared: str
    findings: tuple[Finding, ...]
    moved: tuple[Pair, ...] = ()

    @property
    def found(self) -> bool:
        """Whether there is a fault or a warning."""
        return any(each.level != "note" for each in self.findings)

    def __str__(self) -> str:
        return self.text(20)

    def text(self, rows: int) -> str:
        """Write what was found, with at most so many rows of tensors that differ from the base."""
        dtypes = ", ".join(f"{count} of {dtype}" for dtype, count in self.dtypes.items())
        said = f"; declared: {self.declared}" * bool(self.declared)
        lines = [f"{self.folder}: tensors: {dtypes}{said}", *map(str, self.findings)]
        lines += ["nothing found"] * (not self.findings)
        if self.moved:
            table = [["differs from the base", "share", "ulps: median", "largest", "of"]]
            table += [[p.name, *(f"{x:.3g}" for x in p[1:4]), p.format] for p in self.moved[:rows]]
            more = len(self.moved) - rows
            lines += [aligned(table, {1, 2, 3}), *[f"and {more} more: --all"] * (more > 0)]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same as values of JSON."""
        moved = [pair._asdict() for pair in self.moved]
        about = {"format": 1, "command": "xray", "folder": str(self.folder), "moved": moved}
        found = [asdict(each) for each in self.findings]
        return about | {"dtypes": self.dtypes, "declared": self.declared or None, "findings": found}


def xray(folder: str | os.PathLike[str], base: str | os.PathLike[str] | None = None) -> Xray:
    """Say how a checkpoint was trained and saved, by the bits of its numbers.

    It is read as a stream, on less than 600 MB of memory whatever its size, and nothing in it is
    executed.

    Args:
        folder: A folder of safetensors, of ``torch.save`` or of ``torch.distributed.checkpoint``; a
            run's folder, of which the newest checkpoint is read; or one such file.
        base: The checkpoint that it was trained from.

    Returns:
        What was found; each finding is proved by bits, and names its tensors.

    Raises:
        CheckpointError: If a file is damaged, foreign or holds code, or nothing is to be compared.
    """
    read = read_folder(Path(folder))
    both = _both(read, read_folder(Path(base))) if base is not None else {}
    pairs = {name: _pair(*two) for name, two in both.items() if two[0].ordered and two[1].ordered}
    tensors = [_count(each) for each in read.tensors.values()]
    said = read.said
    named = said.get("manifest", {}).get("precision") or said.get("state", {}).get("precision")
    policy = parse_saved(named.get("policy") if isinstance(named, dict) else named)
    config = said.get("config", {})
    dtype, declared = config.get("dtype", config.get("torch_dtype")), set()
    claimed = dtype == "float32" and any(x.dtype == "F32" and not x.low for x in tensors)
    if dtype in ("bfloat16", "float16"):
        declared = {"narrow_values"}
    if policy:
        masters = policy.master_dtype == torch.float32
        claimed = policy.moments == "fp32" or (policy.moments == "master" and masters)
        declared |= set() if masters else _NO_MASTERS
        declared |= set() if claimed else {"moments_narrow"}
    dtypes = {name: two[1].dtype for name, two in both.items()}
    evidence = _Evidence(read, tensors, pairs, dtypes, claimed)
    moved = sorted((p for p in pairs.values() if p.share), key=lambda pair: -pair.share)
    found = tuple(_findings(evidence, declared))
    counts = Counter(each.dtype for each in tensors)
    return Xray(read.path, counts, str(policy or ""), found, tuple(moved))


def _both(read: Folder, base: Folder) -> dict[str, tuple[Stored, Stored]]:
    """The tensors that two checkpoints both have, by names without those of wrappers."""
    own, others = _named(read), _named(base)
    if not own.keys() & others.keys():  # a wrapper of another name around one of them
        own, others = _named(read, inner=True), _named(base, inner=True)
    pairs = [(one, others[name]) for name, one in own.items() if name in others]
    both = {one.name: (one, two) for one, two in pairs if one.shape == two.shape}
    if not both:
        raise CheckpointError(
            f"{base.path}: no tensor in common with {read.path} by name and shape, such as "
            f"{next(iter(base.tensors)):.80}; give the checkpoint that it was trained from"
        )
    return both


def _named(folder: Folder, inner: bool = False) -> dict[str, Stored]:
    """Tensors by names without those of wrappers; without all that begins their names, if asked."""
    average = re.compile(_KINDS["average"])
    found = {_plain(k): x for k, x in folder.tensors.items() if not average.search(k)}
    first, last = min(found, default=""), max(found, default="")
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    skip = first[:same].rfind(".") + 1 if inner else 0
    return {_plain(name[skip:]): each for name, each in found.items()}


def _both_numbers(one: Stored, two: Stored) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield the numbers of two tensors of one shape side by side, however they lie in files."""
    theirs, y = two.chunks(), np.zeros(0)
    for raw in one.chunks():
        x = _numbers(raw, one.dtype)
        while x.size:
            y = y if y.size else _numbers(next(theirs), two.dtype)
            some = min(x.size, y.size)
            yield x[:some], y[:some]
            x, y = x[some:], y[some:]


@np.errstate(all="ignore")
def _pair(one: Stored, two: Stored) -> Pair:
    """Count the elements that differ, and by how many ulps of the narrower format."""
    forms = [_FORMATS.get(each.dtype, FP32) for each in (one, two)]
    form = min(forms, key=lambda form: form.mantissa_bits)
    counts, largest = np.zeros(1 << 16, np.int64), 0.0
    for x, y in _both_numbers(one, two):
        changed = x != y
        x, y = x[changed], y[changed]
        exponent = np.frexp(np.maximum(np.abs(x), np.abs(y)))[1] - 1
        gap = np.exp2(np.maximum(exponent, form.min_exponent) - form.mantissa_bits)
        ulps = np.nan_to_num(np.abs(x - y) / gap, nan=np.inf)
        largest = max(largest, float(ulps.max(initial=0)))
        counts += np.bincount(np.minimum(ulps, 65_535).astype(np.int64), minlength=len(counts))
    total = int(counts.sum())
    median = int(np.searchsorted(counts.cumsum(), (total + 1) // 2)) if total else 0
    return Pair(one.name, total / max(math.prod(one.shape), 1), median, largest, form.name)
