"""The dynamic loss scale climbs until gradients overflow, halves, and loses one step each time.

A small regression runs 400 steps of fp16-mixed with a scale that doubles after every 25 good steps
(2,000 is the default; 25 shows everything in one figure). At step 200 one batch is multiplied by
8,000. Look at the skipped steps: the scale falls, the next step's loss continues where it was, and
no inf has reached a weight.

Run: python examples/dynamic_scale.py [--out FOLDER]
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn

import halfstep

STEPS, OUTLIER_STEP, OUTLIER = 400, 200, 8000.0
POLICY = "compute=fp16,scale=dynamic,init_scale=1024,growth_interval=25"
# Okabe and Ito's palette, safe for colour-blind readers; https://jfly.uni-koeln.de/color
BLUE, ORANGE = "#0072B2", "#D55E00"


def train() -> list[halfstep.StepResult]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    precision = halfstep.Precision(POLICY, model, optimizer)
    inputs = torch.randn(2048, 32)
    targets = inputs[:, :4].sin().sum(dim=1, keepdim=True)
    results = []
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(inputs), (128,))
        batch = inputs[rows] * (OUTLIER if step == OUTLIER_STEP else 1.0)
        with precision.autocast():
            loss = nn.functional.mse_loss(model(batch), targets[rows])
        results.append(precision.step(loss))
    return results


def print_table(results: list[halfstep.StepResult]) -> None:
    """Make one row for every step that changed the scale, and for the last step."""
    print(
        f"{'step':>4}  {'event':<13}  {'scale':>6}  {'next':>6}  {'loss':>10}  {'|gradient|':>10}"
    )
    for step, result in enumerate(results, start=1):
        if result.next_loss_scale != result.loss_scale or step == len(results):
            event = result.reason or "applied"  # why the step was skipped, if it was
            print(
                f"{step:>4}  {event:<13}  {power(result.loss_scale):>6}  "
                f"{power(result.next_loss_scale):>6}  {result.loss:>10.4g}  "
                f"{result.grad_norm:>10.4g}"
            )
    skipped = results[-1].skipped_total
    print(f"{len(results)} steps: {len(results) - skipped} applied, {skipped} skipped")


def power(scale: float) -> str:
    return f"2^{math.log2(scale):.0f}"


def pyplot():
    """Import pyplot, without a window; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: matplotlib is not installed; pip install 'halfstep[plot]'")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def draw(plt, results: list[halfstep.StepResult], path: Path) -> None:
    figure, (scale, loss) = plt.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    steps = range(1, len(results) + 1)
    skipped = [step for step, result in zip(steps, results, strict=True) if not result.applied]
    scale.step(steps, [r.loss_scale for r in results], where="mid", color=BLUE, lw=2.2)
    scale.set_yscale("log", base=2)
    scale.set_ylabel("loss scale")
    scale.set_title("Doubles after 25 good steps, halves at each overflow")
    loss.plot(steps, [r.loss for r in results], color=BLUE, lw=1.6, label="loss")
    loss.set_yscale("log")
    loss.set_ylabel("loss (mean squared error)")
    loss.set_xlabel("step")
    loss.set_title("A skipped step leaves no trace in the loss of the next")
    for axes, values in ((scale, "loss_scale"), (loss, "loss")):
        heights = [getattr(results[step - 1], values) for step in skipped]
        axes.plot(skipped, heights, "X", color=ORANGE, ms=9, label="skipped step")
        axes.grid(alpha=0.3)
    scale.legend(frameon=False, loc="lower right")
    loss.legend(frameon=False, loc="upper right")
    loss.annotate(
        f"batch times {OUTLIER:,.0f}", (OUTLIER_STEP, results[OUTLIER_STEP - 1].loss),
        xytext=(10, 0), textcoords="offset points", va="center",
    )  # fmt: skip
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    out = parser.parse_args().out
    results = train()
    print_table(results)
    plt = pyplot()
    if plt is not None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "dynamic_scale.png"
        draw(plt, results, path)
        print(f"figure: {path}")


if __name__ == "__main__":
    main()
