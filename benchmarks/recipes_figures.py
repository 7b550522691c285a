"""Judges what `recipes.py` wrote: tables on stdout and the figures of docs/low-bit.md as SVG.

    python benchmarks/recipes_figures.py [--results FILE FILE] [--out docs/figures]

Seeds are paired: all recipes of a seed share weights and batches, so that what differs between
seeds cancels in a difference. `p` is Student's two-sided t of the difference to bf16-mixed, once
from that recipe's seeds alone (few degrees of freedom) and once with the noise of all recipes
pooled: the residual of a two-way analysis of variance, recipes by seeds, which assumes that all are
equally noisy. Needs matplotlib and scipy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from common import RESULTS
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


def style() -> None:
    mpl.use("Agg")
    plt.rcParams.update({
        "font.size": 12, "axes.spines.top": False, "axes.spines.right": False,
        "svg.hashsalt": "halfstep", "savefig.facecolor": "white", "svg.fonttype": "path",
    })  # fmt: skip


def draw_curves(studies: dict[str, tuple[list[int], dict[str, np.ndarray]]], path: Path) -> None:
    """Losses above those of bf16-mixed of the same seed, by text; bands of a standard error."""
    figure, panels = plt.subplots(
        1, len(studies), figsize=(10, 4.8), layout="constrained", sharey=True, squeeze=False
    )
    late = []
    for axes, (text, (steps, losses)) in zip(panels[0], studies.items(), strict=True):
        for name, runs in losses.items():
            if name == BASE:
                continue
            change = runs - losses[BASE]
            mean, error = change.mean(0), change.std(0, ddof=1) / np.sqrt(len(change))
            axes.plot(steps, mean, color=COLOURS[name], lw=2, label=name)
            low, high = mean - error, mean + error
            axes.fill_between(steps, low, high, color=COLOURS[name], alpha=0.15, lw=0)
            late += [low[len(steps) // 6 :], high[len(steps) // 6 :]]
        axes.axhline(0, color="black", lw=1)
        axes.set(xlabel="step", title=f"{text}, {len(losses[BASE])} seeds")
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylim(np.min(late) - 0.003, np.max(late) + 0.003)
    panels[0, 0].set_ylabel("validation loss above bf16-mixed, nats a byte")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_sensitivity(found: dict[str, Any], path: Path) -> None:
    """The gradient's error by recipe, and by layer and product in NVFP4."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4.6), layout="constrained", width_ratios=(0.8, 1)
    )
    errors = dict(sorted(found["by_recipe"].items(), key=lambda entry: entry[1]))
    bars = left.barh([*errors], [100 * value for value in errors.values()], color="#0072B2")
    left.bar_label(bars, [f"{value:.1%}" for value in errors.values()], padding=3, fontsize=11)
    left.invert_yaxis()
    left.set_xlim(0, 120 * max(errors.values()))
    left.set(xlabel="error of the gradient, per cent", title="The whole model")
    layers = [f"layers.{b}.{name}" for b in range(len(found["by_block"])) for name in LINEARS]
    table = np.array(
        [[found["by_layer"][f"{x}/{product}"] for product in PRODUCTS] for x in layers]
    )
    right.imshow(table, aspect="auto", cmap="Blues", norm="log")
    dark = np.sqrt(table.min() * table.max())
    for (y, x), value in np.ndenumerate(table):
        colour = "white" if value > dark else "black"
        right.text(x, y, f"{value:.1%}", ha="center", va="center", color=colour)
    right.set_xticks(range(len(PRODUCTS)), PRODUCTS)
    right.set_yticks(range(len(layers)), [x.removeprefix("layers.") for x in layers])
    right.set_title("One product of one layer in NVFP4")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


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
    style()
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw_curves(studies, arguments.out / "recipes-loss.svg")
    draw_sensitivity(contents[0]["sensitivity"], arguments.out / "recipes-gradients.svg")


if __name__ == "__main__":
    main()
