"""Judges what `recipes.py` wrote: tables on stdout, and the figures of docs/low-bit.md as SVG.

    python benchmarks/recipes_figures.py [--results FILE FILE] [--out docs/figures]

Seeds are paired: all recipes of a seed share weights and batches, so that what differs between
seeds cancels in a difference. `p` is Student's two-sided t of the difference to bf16-mixed, once
from that recipe's seeds alone (few degrees of freedom) and once with the noise of all recipes
pooled: the residual of a two-way analysis of variance, recipes by seeds, which assumes that all are
equally noisy. Figures are drawn in English and in Chinese. Needs matplotlib, scipy and an installed
font with Chinese characters.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from charts import TEXTS, Say
from common import RESULTS
from figures import fonts_of, standalone_svg
from halfstep.report.page import GRID, INK, PAPER, new_figure
from recipes import KEPT, LAST, LINEARS, POLICIES

STUDIES = [RESULTS / f"recipes-{text}.json" for text in ("tinyshakespeare", "standard-library")]
BASE, PRODUCTS = "bf16-mixed", ("fprop", "dgrad", "wgrad")
TAIL = 5
"""So many last evaluations are averaged as well, since one depends on the last steps' chance."""
CLAIMS = (("mxfp8", BASE), ("nvfp4", BASE), ("nvfp4", "mxfp8"), ("nvfp4-nearest", "nvfp4"),
          ("nvfp4-unmixed", "nvfp4"), (KEPT, "nvfp4"), (LAST, "nvfp4"), (LAST, KEPT))  # fmt: skip
# Okabe and Ito's palette, safe for colour-blind readers; https://jfly.uni-koeln.de/color
COLOURS = dict(
    zip(POLICIES, ("#999999", "#000000", "#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#009E73",
                   "#56B4E9"),
        strict=True)
)  # fmt: skip


def curves(content: dict[str, Any]) -> tuple[list[int], dict[str, np.ndarray]]:
    """Steps of the evaluations; by recipe the losses (seed, evaluation) of seeds that all have."""
    seeds = sorted({int(key.rpartition("/")[2]) for key in content["runs"]})
    whole = [s for s in seeds if all(f"{name}/{s}" in content["runs"] for name in POLICIES)]
    found = {}
    for name in POLICIES:
        runs = [content["runs"][f"{name}/{seed}"]["validation"] for seed in whole]
        found[name] = np.array([[loss for _, loss in run] for run in runs])
    return [step for step, _ in runs[0]], found


def noise(final: dict[str, np.ndarray]) -> tuple[float, int]:
    """The deviation of a recipe's loss beside its seed's and its own mean; degrees of freedom."""
    table = np.stack([*final.values()])
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return float(np.sqrt((rest**2).sum() / freedom)), freedom


def judge(final: dict[str, np.ndarray], base: str = BASE) -> dict[str, dict[str, float]]:
    """Means, deviations, and differences to a recipe with both values of p, by recipe."""
    deviation, freedom = noise(final)
    error = deviation * np.sqrt(2 / len(final[base]))  # of a difference of two means
    found = {}
    for name, losses in final.items():
        change = losses - final[base]
        row = {"mean": losses.mean(), "sd": losses.std(ddof=1), "difference": change.mean()}
        if name != base:
            row["p"] = stats.ttest_1samp(change, 0).pvalue
            row["p_pooled"] = 2 * stats.t.sf(abs(change.mean()) / error, freedom)
        found[name] = {key: float(value) for key, value in row.items()}
    return found


def print_table(judged: dict[str, dict[str, float]]) -> None:
    print("| recipe | validation loss | s.d. over seeds | to bf16-mixed | p, its seeds alone | "
          "p, pooled |\n|---|---|---|---|---|---|")  # fmt: skip
    for name, row in judged.items():
        line = f"| {name} | {row['mean']:.4f} | {row['sd']:.4f} |"
        if "p" in row:
            line += f" {row['difference']:+.4f} | {row['p']:.2g} | {row['p_pooled']:.2g} |"
        else:
            line += " | | |"
        print(line)


def print_claims(final: dict[str, np.ndarray]) -> None:
    """Print each difference that a published claim is about."""
    for name, base in CLAIMS:
        row = judge(final, base)[name]
        print(f"{name} - {base}: {row['difference']:+.4f}, p {row['p']:.2g}, pooled "
              f"{row['p_pooled']:.2g}")  # fmt: skip
    gap, left = (final[name].mean() - final[BASE].mean() for name in ("nvfp4", KEPT))
    deviation, freedom = noise(final)
    error = deviation * np.sqrt((1 + 0.25 + 0.25) / len(final[BASE]))
    p = stats.t.sf((gap / 2 - left) / error, freedom)
    print(
        f"the kept block closes {1 - left / gap:.0%} of the gap; at least half: one-sided p {p:.2g}"
    )


def draw_losses(figure: Any, contents: list[dict[str, Any]], say: Say) -> None:
    """Losses above those of bf16-mixed of the same seed, by text; bands of a standard error."""
    panels = figure.subplots(1, len(contents), sharey=True, squeeze=False)[0]
    late = []
    for axes, content in zip(panels, contents, strict=True):
        steps, losses = curves(content)
        for name, runs in losses.items():
            if name == BASE:
                continue
            change = runs - losses[BASE]
            mean, error = change.mean(0), change.std(0, ddof=1) / np.sqrt(len(change))
            axes.plot(steps, mean, color=COLOURS[name], lw=2, label=named(name, say))
            low, high = mean - error, mean + error
            axes.fill_between(steps, low, high, color=COLOURS[name], alpha=0.15, lw=0)
            late += [low[len(steps) // 6 :], high[len(steps) // 6 :]]
        axes.axhline(0, color=INK, lw=1)
        text, seeds = Path(content["data"]).stem, len(losses[BASE])
        plain(axes, say("study").format(text=text, seeds=seeds), say("step"))
        axes.grid(color=GRID, linewidth=0.6)
    panels[0].set_ylim(np.min(late) - 0.003, np.max(late) + 0.003)
    panels[0].set_ylabel(say("above"), color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=4, frameon=False, labelcolor=INK
    )


def draw_gradients(figure: Any, contents: list[dict[str, Any]], say: Say) -> None:
    """The gradient's error with the first text: by recipe, and by layer and product in NVFP4."""
    found = contents[0]["sensitivity"]
    left, right = figure.subplots(1, 2, width_ratios=(0.8, 1))
    errors = dict(sorted(found["by_recipe"].items(), key=lambda entry: entry[1]))
    bars = left.barh([*errors], [100 * value for value in errors.values()], color="#0072B2")
    shown = [f"{value:.1%}" for value in errors.values()]
    left.bar_label(bars, shown, padding=3, fontsize=11, color=INK)
    left.invert_yaxis()
    left.set_xlim(0, 120 * max(errors.values()))
    plain(left, say("whole_model"), say("gradient_error"))
    layers = [f"layers.{b}.{name}" for b in range(len(found["by_block"])) for name in LINEARS]
    table = np.array(
        [[found["by_layer"][f"{x}/{product}"] for product in PRODUCTS] for x in layers]
    )
    right.imshow(table, aspect="auto", cmap="Blues", norm="log")
    dark = np.sqrt(table.min() * table.max())
    for (y, x), value in np.ndenumerate(table):
        colour = PAPER if value > dark else INK
        right.text(x, y, f"{value:.1%}", ha="center", va="center", color=colour)
    right.set_xticks(range(len(PRODUCTS)), PRODUCTS)
    right.set_yticks(range(len(layers)), [x.removeprefix("layers.") for x in layers])
    plain(right, say("one_product"), "")


def named(recipe: str, say: Say) -> str:
    """A recipe's name in a legend."""
    return say(recipe) if recipe in TEXTS else recipe


def plain(axes: Any, title: str, label: str) -> None:
    """Axes with a title and a label below, without a frame above and at the right."""
    axes.set_title(title, color=INK)
    axes.set_xlabel(label, color=INK)
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(INK)


FIGURES: Mapping[str, tuple[tuple[float, float], Callable[..., None]]] = {
    "recipes-loss": ((10, 4.8), draw_losses),
    "recipes-gradients": ((10, 4.6), draw_gradients),
}
"""A figure's name to its size in inches and the function that fills it."""


def drawn(name: str, contents: list[dict[str, Any]], language: str) -> str:
    """One figure as SVG; its text stays text."""
    from matplotlib import rc_context

    with fonts_of(language) as spoken, rc_context({"font.size": 12}):
        if spoken != language:
            raise SystemExit("no installed font has Chinese characters: install fonts-noto-cjk")
        size, fill = FIGURES[name]
        figure = new_figure(size)
        fill(figure, contents, lambda key: TEXTS[key][language])
        return standalone_svg(figure, salt=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, nargs="+", default=STUDIES)
    parser.add_argument("--out", type=Path, default=RESULTS.parents[1] / "docs" / "figures")
    arguments = parser.parse_args()
    contents = [json.loads(path.read_text()) for path in arguments.results]
    studies = {Path(content["data"]).stem: curves(content) for content in contents}
    for text, (steps, losses) in studies.items():
        final = {name: runs[:, -1] for name, runs in losses.items()}
        print(f"{text}: validation loss after {steps[-1]} steps, {len(final[BASE])} seeds")
        print_table(judge(final))
        tail = {name: runs[:, -TAIL:].mean(1) for name, runs in losses.items()}
        for label, what in (
            (f"step {steps[-1]}", final),
            (f"mean of steps {steps[-TAIL]} to {steps[-1]}", tail),
        ):
            print(f"\n{label}")
            print_claims(what)
        print()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in FIGURES:
        for language, end in (("en", ".svg"), ("zh", ".zh.svg")):
            svg = drawn(name, contents, language)
            (arguments.out / f"{name}{end}").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
