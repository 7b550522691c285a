"""Shows the memory of training steps: stacked by part and format, as a figure, table and words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from halfstep.diagnostics.memory.table import PARTS, REASONS, Memory, size_text
from halfstep.errors import ConfigError
from halfstep.report.figures import (
    COLOURS,
    GRID,
    INK,
    PAPER,
    as_svg,
    largest,
    new_figure,
    plain,
    save_png,
    styled,
)
from halfstep.report.record import RunRecord
from halfstep.report.translation import gettext

_COLOURS: Mapping[str, str] = {
    "weights": COLOURS[0],
    "masters": COLOURS[5],
    "gradients": COLOURS[1],
    "moments": COLOURS[4],
    "cast copies": COLOURS[0],
    "activations": COLOURS[2],
    "logits": COLOURS[3],
    "batch": GRID,
}
_HATCHES: Mapping[str, str] = {"fp32": "", "bf16": "////", "fp16": "////"}
_OTHER_HATCH = "xxx"
_SHADES: Mapping[str, float] = {"cast copies": 0.45}
_LEAST_SHARE = 0.002
"""Of the longest bar; what is narrower cannot be seen."""


Bar = tuple[str, Memory, float | None]
"""A name, what a step holds, and the measured peak of the run, where there is one."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a bar: bytes of one part in one format."""

    part: str
    form: str
    size: int


def segments(memory: Memory) -> Iterator[Segment]:
    """The pieces of a step's memory, in the order of the parts."""
    for part in PARTS:
        for form, size in memory.bytes.get(part, {}).items():
            yield Segment(part, form, size)


def memory_figure(bars: Sequence[Bar], language: str = "en") -> Any:
    """A bar of each, stacked by part and format (hatch); None without matplotlib."""
    most = max([*(memory.total for _, memory, _ in bars), *(p for *_, p in bars if p is not None)])
    pieces = [[*segments(memory)] for _, memory, _ in bars]
    seen = [piece for each in pieces for piece in each if piece.size > _LEAST_SHARE * most]
    figure = new_figure((8.4, 1.2 + 0.55 * len(bars) + 0.22 * 6))
    if figure is None:
        return None
    axes = figure.subplots()
    axes.set_axisbelow(True)
    unit, name = (1e9, "GB") if most >= 1e10 else (1e6, "MB")
    for i, (_, _, peak) in enumerate(bars):
        left = 0.0
        for piece in pieces[i]:
            if piece in seen:
                look = {"color": _COLOURS[piece.part], "alpha": _SHADES.get(piece.part, 1.0)}
                look |= {"hatch": _HATCHES.get(piece.form, _OTHER_HATCH), "edgecolor": PAPER}
                axes.barh(i, piece.size / unit, left=left / unit, height=0.62, **look, linewidth=0)
            left += piece.size
        if peak is not None:
            axes.vlines(peak / unit, i - 0.4, i + 0.4, color=INK, linewidth=1.6)
    axes.set_yticks(range(len(bars)), [plain(each) for each, _, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)  # the first on top
    styled(axes, name)
    _legend(figure, axes, seen, bars, language)
    return figure


def _legend(
    figure: Any, axes: Any, pieces: Sequence[Segment], bars: Sequence[Bar], language: str
) -> None:
    """Explain colours, then hatches, then the line of the measured peak."""
    for part in (part for part in PARTS if any(piece.part == part for piece in pieces)):
        label = plain(gettext(part, language))
        axes.barh(0, 0, color=_COLOURS[part], alpha=_SHADES.get(part, 1.0), label=label)
    hatches: dict[str, list[str]] = {}
    for form in dict.fromkeys(piece.form for piece in pieces):
        hatches.setdefault(_HATCHES.get(form, _OTHER_HATCH), []).append(form)
    for hatch, forms in hatches.items():
        look = {"color": GRID, "edgecolor": INK, "hatch": hatch, "label": plain(", ".join(forms))}
        axes.barh(0, 0, linewidth=0, **look)
    if any(peak is not None for *_, peak in bars):
        axes.vlines([], 0, 0, color=INK, linewidth=1.6, label=gettext("measured peak", language))
    figure.legend(
        loc="outside lower center", ncols=3, frameon=False, fontsize=7.5, labelcolor=INK,
        handlelength=2.2, handleheight=1.1,
    )  # fmt: skip


def require_figure_name(path: Path) -> None:
    """Refuse a path whose suffix names no form of a figure.

    Raises:
        ConfigError: With the forms.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--out {path}; allowed: a name that ends in .svg or .png")


def write_memory_figure(bars: Sequence[Bar], path: Path) -> bool:
    """Write the figure as SVG or PNG, by the path's suffix; whether matplotlib is there to do it.

    Raises:
        ConfigError: For another suffix, or a path that cannot be written.
    """
    require_figure_name(path)
    if new_figure((1.0, 1.0)) is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(memory_figure(bars), path)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error}") from error
    return True


def _save(figure: Any, path: Path) -> None:
    if path.suffix.lower() == ".png":
        save_png(figure, path)
    else:
        temporary = path.with_name(f".{path.name}")
        figure.savefig(temporary, format="svg", facecolor="white", metadata={"Date": None})
        temporary.replace(path)


def sentence(memory: Memory, language: str) -> str:
    """What holds the memory, and why 16 bits saved less than half of it."""
    reasons = [
        gettext(REASONS[each.name], language).format(share=f"{each.share:.0%}")
        for each in memory.reasons()
    ]
    total, several = size_text(memory.total), gettext("; ", language).join(reasons)
    return gettext("Of {total}, {reasons}.", language).format(total=total, reasons=several)


@dataclass(frozen=True, slots=True)
class MemoryView:
    """What a page shows of the memory of some runs; nothing of those that did not write it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    """A run's name, its parts, their total, and the measured peak."""
    sentences: Sequence[tuple[str, str]]
    """A run's name to its :func:`sentence`."""
    svg: Markup
    """The figure; empty where none was drawn."""


def memory_view(
    runs: Sequence[RunRecord], language: str, *, drawn: bool = False
) -> MemoryView | None:
    """The memory of the runs that wrote it; None if none of them did."""
    bars = [(run.name, run.memory, _peak(run)) for run in runs if run.memory is not None]
    bars = [bar for bar in bars if bar[1].total]
    if not bars:
        return None
    parts = [part for part in PARTS if any(memory.part(part) for _, memory, _ in bars)]
    rows = [
        [
            name,
            *(size_text(memory.part(part)) if memory.part(part) else "-" for part in parts),
            size_text(memory.total),
            "-" if peak is None else size_text(peak),
        ]
        for name, memory, peak in bars
    ]
    names = [gettext(part, language) for part in [*parts, "total"]]
    figure = memory_figure(bars, language) if drawn else None
    return MemoryView(
        [gettext("Run", language), *names, gettext("Peak memory", language)],
        rows,
        [(name, sentence(memory, language)) for name, memory, _ in bars],
        Markup("" if figure is None else as_svg(figure, salt="memory")),
    )


def memory_json(run: RunRecord, language: str) -> dict[str, Any]:
    """The same of one run as plain values; empty where it wrote none."""
    if run.memory is None:
        return {}
    text = sentence(run.memory, language)
    return {"memory": {**run.memory.to_json(), "peak_bytes": _peak(run), "text": text}}


def _peak(run: RunRecord) -> float | None:
    found = largest(run, "peak_memory_bytes")
    return found if found is not None and math.isfinite(found) else None
