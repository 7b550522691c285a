"""Draws the figures of README and docs/measured.md from results/, in English and in Chinese.

    python benchmarks/charts.py [--out docs/figures] [NAME ...]

Needs matplotlib and, for the Chinese ones, an installed font with Chinese characters. The numbers
of a figure are those of its JSON files and of `bytes_per_parameter`; nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from figures import fonts_of, standalone_svg
from halfstep import parse_policy
from halfstep.precision.explain import bytes_per_parameter
from halfstep.report.page import (
    COLOURS,
    GRID,
    INK,
    new_figure,
    styled,
)

FOLDER = Path(__file__).parent
RESULTS, FIGURES = FOLDER / "results", FOLDER.parent / "docs" / "figures"
OURS, THEIRS = COLOURS[0], "#8c959f"

Say = Callable[..., str]
"""A name of TEXTS and the values to put in, to the phrase in the language that is drawn."""

TEXTS: Mapping[str, Mapping[str, str]] = tomllib.loads(
    (FOLDER / "charts.toml").read_text(encoding="utf-8")
)


def result(name: str) -> dict[str, Any]:
    """The newest result of a benchmark."""
    return json.loads(max(RESULTS.glob(f"{name}-20??-??-??.json")).read_text(encoding="utf-8"))


def bars(
    axes: Any,
    title: str,
    rows: Sequence[tuple[str, float, str]],
    *,
    whiskers: Sequence[tuple[float, float]] = (),
    form: str = "{:,.0f}",
    names: bool = True,
) -> None:
    """Horizontal bars from above to below: name, value and colour, the number after each."""
    values = [value for _, value, _ in rows]
    at = range(len(rows))
    how: dict[str, Any] = {"color": [colour for *_, colour in rows], "height": 0.72}
    if whiskers:
        low = [max(0.0, v - a) for v, (a, _) in zip(values, whiskers, strict=True)]
        high = [max(0.0, b - v) for v, (_, b) in zip(values, whiskers, strict=True)]
        how |= {"xerr": [low, high], "ecolor": INK, "error_kw": {"elinewidth": 0.8}}
    axes.barh(at, values, **how)
    ends = [max(v, b) for v, (_, b) in zip(values, whiskers, strict=True)] if whiskers else values
    for y, value, end in zip(at, values, ends, strict=True):
        axes.annotate(form.format(value), (end, y), (3, 0), textcoords="offset points",
                      va="center", fontsize=9.5, color=INK)  # fmt: skip
    axes.set_yticks(at, [name for name, *_ in rows] if names else [""] * len(rows))
    axes.set_xlim(0, 1.3 * max(ends))
    axes.invert_yaxis()
    bare(axes, title)


def bare(axes: Any, title: str) -> None:
    """Axes of bars: a title, names, and nothing else."""
    axes.set_title(title, color=INK, fontsize=10.5)
    axes.set_xticks([])
    axes.set_facecolor("none")
    axes.tick_params(colors=INK, labelsize=9.5, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def peers(figure: Any, say: Say) -> None:
    """Whole loops beside halfstep's: speed and memory."""
    found = result("peers-gpt-14m")["rows"]
    keys = [key for key in found if key in TEXTS]
    rows = [(say(key), found[key], OURS if "halfstep" in key else THEIRS) for key in keys]
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    bars(left, say("tokens"), [(n, row["tokens_per_second"], c) for n, row, c in rows],
         whiskers=[row["quartiles"] for _, row, _ in rows])  # fmt: skip
    bars(right, say("peak"), [(n, row["peak_mb"], c) for n, row, c in rows], names=False)
    note(figure, say("peers_note"))


def speed(figure: Any, say: Say) -> None:
    """Tokens per second of every policy, and of loops by hand."""
    found = result("train-cpu")["gpt-small-cpu"]
    rows = [
        (key, row["tokens_per_second"], THEIRS if key.startswith("bare") else OURS)
        for key, row in found.items()
    ]
    best = [(row["tokens_per_second"], row["best_tokens_per_second"]) for row in found.values()]
    bars(figure.subplots(), say("best"), rows, whiskers=best)
    note(figure, say("speed_note"))


def quality(figure: Any, say: Say) -> None:
    """Curves of one seed that lie on each other, and the differences beside the noise of seeds."""
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    found = result("quality-cpu")["policies"]
    shown = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-pure")
    for i, (policy, width) in enumerate(zip(shown, (5, 2.8, 1.1, 0.8), strict=True)):
        smooth = [fmean(found[policy]["train_losses"][k : k + 5]) for k in range(0, 300, 5)]
        how = {"linewidth": width, "color": COLOURS[i], "label": policy}
        left.plot(range(3, 301, 5), smooth, **how)
    styled(left, say("step"))
    left.set_title(say("loss"), color=INK, fontsize=10.5)
    seeds = result("quality-cpu-seeds")["policies"]
    base = {seed: run["val_loss"] for seed, run in seeds["fp32"]["seeds"].items()}
    mean = seeds["fp32"]["val_loss"]
    band = 200 * seeds["fp32"]["standard_deviation_over_seeds"] / mean
    right.axvspan(-band, band, color=GRID, alpha=0.6, linewidth=0, label=say("noise"))
    names = [policy for policy in found if policy != "fp32"]
    names += [policy for policy in seeds if policy not in ("fp32", *names)]
    for y, policy in enumerate(names):
        if policy in seeds:
            runs = seeds[policy]["seeds"]
            apart = [100 * (run["val_loss"] / base[seed] - 1) for seed, run in runs.items()]
            how = {"color": COLOURS[1], "s": 26, "label": say("seeds")}
            right.scatter(apart, [y + 0.15] * len(apart), **how)
        if policy in found:
            how = {"color": COLOURS[0], "s": 34, "marker": "D", "label": say("one")}
            right.scatter(100 * found[policy]["relative_to_fp32"], y - 0.15, **how)
    right.set_yticks(range(len(names)), [name.replace(",", ",\n") for name in names], fontsize=9)
    right.invert_yaxis()
    right.set_ylim(len(names) + 1.2, -0.6)
    styled(right, "")
    handles, labels = right.get_legend_handles_labels()
    kept = dict(zip(labels, handles, strict=True))
    right.legend(kept.values(), kept, frameon=False, fontsize=8, labelcolor=INK, loc="lower center")
    right.set_title(say("apart"), color=INK, fontsize=10.5)
    note(figure, say("quality_note"))


def memory(figure: Any, say: Say) -> None:
    """What policies store for each parameter, and what whole processes take."""
    left, right = figure.subplots(1, 2, width_ratios=(1, 1))
    policies = ("fp32", "bf16-mixed", "bf16-master", "bf16-split", "bf16-split,moments=8bit")
    tables = [bytes_per_parameter(parse_policy(policy)) for policy in policies]
    ends = [0.0] * len(policies)
    for i, part in enumerate(("weights", "remainder", "masters", "gradients", "moments")):
        sizes = [float(parts[part]) for parts in tables]
        left.barh(range(len(policies)), sizes, left=ends, color=COLOURS[i], label=say(part))
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for y, end in enumerate(ends):
        left.annotate(f"{end:.4g}", (end, y), (3, 0), textcoords="offset points", va="center",
                      fontsize=9.5, color=INK)  # fmt: skip
    left.set_yticks(range(len(policies)), [name.replace(",", ",\n") for name in policies])
    left.set_xlim(0, 1.15 * max(ends))
    left.invert_yaxis()
    bare(left, say("bytes"))
    left.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=3, loc="upper center",
                bbox_to_anchor=(0.4, 0.0))  # fmt: skip
    found = result("peers-gpt-14m")["rows"]
    keys = ("bare fp32", "bare autocast", "halfstep.Precision bf16-mixed, their model",
            "halfstep train bf16-mixed", "halfstep train bf16-split, 8-bit moments")  # fmt: skip
    rows = [(say(k).replace(", ", ",\n", 1).replace("\uff0c", "\uff0c\n", 1), found[k]["peak_mb"],
             OURS if "halfstep" in k else THEIRS) for k in keys]  # fmt: skip
    bars(right, say("process"), rows)
    note(figure, say("memory_note"))


def traffic(figure: Any, say: Say) -> None:
    """Bytes that two ranks send, and what becomes of a step's time."""
    found = result("ranks-cpu")["steps"]
    keys = ("bare DDP fp32", "data=2 fp32", "data=2 fp32,reduce=bf16", "bare FSDP2 fp32",
            "shard=2 fp32")  # fmt: skip
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    rows = [
        (key.replace("bare", "torch"), found[key], OURS if "=" in key else THEIRS) for key in keys
    ]
    sent = [(name, row["bytes_per_step"] / 1e6, colour) for name, row, colour in rows]
    bars(left, say("sent"), sent, form="{:.1f}")
    times = [(name, row["median_seconds"], colour) for name, row, colour in rows]
    bars(right, say("seconds"), times, form="{:.2f}", names=False)
    note(figure, say("traffic_note"))


def optimizer(figure: Any, say: Say) -> None:
    """Time and bytes of one update by torch and by halfstep."""
    found = result("optimizer-cpu")["steps"]
    keys = [key for key in found if key in TEXTS]
    rows = [(say(key), found[key], OURS if "halfstep" in key else THEIRS) for key in keys]
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    bars(left, say("update"), [(n, 1000 * row["median_seconds"], c) for n, row, c in rows])
    bars(right, say("state"), [(n, row["bytes_per_parameter"], c) for n, row, c in rows],
         form="{:.4g}", names=False)  # fmt: skip
    note(figure, say("optimizer_note"))


def demo(figure: Any, say: Say) -> None:
    """One model in three precisions: curves that lie on each other, speed and memory."""
    found = result("demo")
    sides = found["sides"]
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1))
    curves = figure.add_subplot(grid[:, 0])
    for side, colour, width in zip(sides, COLOURS, (6.0, 3.2, 1.2), strict=False):
        label = f"{side['precision']}: {side['val_loss']:.4f}"
        curves.plot(side["steps"], side["losses"], color=colour, label=label, linewidth=width)
    styled(curves, say("step"))
    curves.set_title(say("loss"), color=INK, fontsize=11)
    curves.legend(title=say("final"), frameon=False, fontsize=10, labelcolor=INK)
    names = [f"{side['precision']}{'*' * side['simulated']}" for side in sides]
    for i, (title, key, scale) in enumerate((("rate", "rate", 1), ("peak", "peak_bytes", 1e6))):
        values = [side[key] / scale for side in sides]
        rows = list(zip(names, values, COLOURS, strict=False))
        bars(figure.add_subplot(grid[i, 1]), say(title), rows)
    note(figure, f"{say('trial').format(**found['trial'])}\n{say('simulated')}")


CHARTS: Mapping[str, tuple[tuple[float, float], Callable[[Any, Say], None]]] = {
    "peers": ((9.4, 2.8), peers),
    "demo": ((7.6, 3.5), demo),
    "measured-speed": ((7.0, 4.2), speed),
    "measured-quality": ((7.6, 3.9), quality),
    "measured-memory": ((7.6, 3.7), memory),
    "measured-traffic": ((7.6, 2.6), traffic),
    "measured-optimizer": ((7.6, 2.6), optimizer),
}
"""A figure's name to its size in inches and the function that fills it."""


def note(figure: Any, text: str) -> None:
    """What was measured on which machine, below a figure."""
    figure.supxlabel(text, color=INK, fontsize=8.5)


def chart(name: str, language: str) -> str:
    """One figure as SVG."""
    with fonts_of(language) as spoken:
        if spoken != language:
            raise SystemExit("no installed font has Chinese characters: install fonts-noto-cjk")
        size, fill = CHARTS[name]
        figure = new_figure(size)
        fill(figure, lambda key: TEXTS[key][language])
        return standalone_svg(figure, salt=name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join(CHARTS))
    parser.add_argument("--out", type=Path, default=FIGURES)
    arguments = parser.parse_args()
    for name in arguments.names or CHARTS:
        for language, end in (("en", ".svg"), ("zh", ".zh.svg")):
            svg = chart(name, language)
            (arguments.out / f"{name}{end}").write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
