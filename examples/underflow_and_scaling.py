"""Without a loss scale, a deep network trained in fp16 learns nothing: its gradients become 0.

A 16-layer GELU network with PyTorch's default initialization is trained in fp32, and in fp16-mixed
with and without a loss scale. Look at the losses: without the scale it never leaves the plateau.
Then, after ten steps, the same batch goes backward three times: in fp32 (the truth), in fp16, and
in fp16 with the scale 2^16. Look at the share of nonzero gradients that become 0, layer by layer:
the first layers' gradients lie below 2^-24, the smallest positive fp16 number.

Run: python examples/underflow_and_scaling.py [--out FOLDER]
"""

import argparse
import copy
import math
from pathlib import Path

import torch
from torch import nn

import halfstep

DEPTH, WIDTH, ROWS, STEPS, LOOK_AT = 16, 96, 256, 130, 10
UNSCALED, SCALED = (f"compute=fp16,scale=static,init_scale={s}" for s in (1, 65536))
RUNS = {"fp32": "fp32", "fp16, no scale": UNSCALED, "fp16, dynamic scale": "fp16-mixed"}
# Okabe and Ito's palette, safe for colour-blind readers; https://jfly.uni-koeln.de/color
COLOURS = {"fp32": "#000000", "fp16, no scale": "#D55E00", "fp16, dynamic scale": "#0072B2"}


def loss_of(model: nn.Module, precision: halfstep.Precision, step: int) -> torch.Tensor:
    """Compute the loss of batch number ``step``, which depends on that number alone."""
    inputs = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step))
    targets = inputs[:, :4].sin().sum(dim=1, keepdim=True)
    with precision.autocast():
        return nn.functional.mse_loss(model(inputs), targets)


def train(policy: str) -> tuple[list[float], nn.Module]:
    """Return the losses of all steps, and the model as it was before step ``LOOK_AT``."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(16, WIDTH), nn.GELU()]
    for _ in range(DEPTH - 2):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    precision = halfstep.Precision(policy, model, optimizer)
    losses, early = [], model
    for step in range(STEPS):
        if step == LOOK_AT:
            early = copy.deepcopy(model)
        losses.append(precision.step(loss_of(model, precision, step), max_norm=1.0).loss)
    return losses, early


def gradients(model: nn.Module, policy: str) -> list[torch.Tensor]:
    """Return the unscaled weight gradients of each linear layer, in order."""
    model = copy.deepcopy(model)
    precision = halfstep.Precision(policy, model, torch.optim.SGD(model.parameters(), lr=0.1))
    precision.backward(loss_of(model, precision, STEPS))
    return [p.grad / precision.loss_scale.value for p in model.parameters() if p.dim() == 2]


def lost(truth: torch.Tensor, found: torch.Tensor) -> float:
    """Return the share of the nonzero true gradients that came out as 0."""
    return float((found[truth != 0] == 0).double().mean())


def print_tables(losses, truth, unscaled, scaled) -> None:
    print(f"{'training':<20}  first 20 losses  last 20 losses")
    for name, run in losses.items():
        print(f"{name:<20}  {sum(run[:20]) / 20:>15.3f}  {sum(run[-20:]) / 20:>14.3f}")
    print(f"\n{'layer':>5}  {'gradients':>9}  {'median |g|':>10}  become 0: no scale  scale 2^16")
    for number, (t, u, s) in enumerate(zip(truth, unscaled, scaled, strict=True), start=1):
        middle = f"2^{math.log2(t.abs().median()):.1f}"
        print(
            f"{number:>5}  {t.numel():>9}  {middle:>10}  {lost(t, u):>18.1%}  {lost(t, s):>10.2%}"
        )
    t, u, s = (torch.cat([g.flatten() for g in each]) for each in (truth, unscaled, scaled))
    print(f"{'all':>5}  {t.numel():>9}  {'':>10}  {lost(t, u):>18.1%}  {lost(t, s):>10.2%}")


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


def draw(plt, losses, truth, unscaled, scaled, path: Path) -> None:
    figure, (sizes, shares, curves) = plt.subplots(1, 3, figsize=(17, 5.2), layout="constrained")
    exponents = torch.cat([t[t != 0].abs().log2().flatten() for t in truth]).floor().numpy()
    bins = range(-44, 12, 2)
    for shift, name in ((0, "fp16, no scale"), (16, "fp16, dynamic scale")):
        label = "as they are" if shift == 0 else "times 2^16"
        sizes.hist(exponents + shift, bins, color=COLOURS[name], alpha=0.6, label=label)
    sizes.set_ylim(0, 1.25 * sizes.get_ylim()[1])  # room for the legend
    sizes.axvline(-24, color="black", lw=2, ls="--")
    sizes.text(-24.7, sizes.get_ylim()[1] * 0.99, "2^-24", ha="right", va="top")
    sizes.set_xlabel("exponent of the true |gradient|, log2")
    sizes.set_ylabel("number of gradients")
    sizes.set_title("Left of the line fp16 has no number")
    layers = range(1, DEPTH + 1)
    for name, found, mark in zip(list(RUNS)[1:], (unscaled, scaled), "sX", strict=True):
        rows = [100 * lost(t, g) for t, g in zip(truth, found, strict=True)]
        label = name.replace("dynamic scale", "scale 2^16")
        shares.plot(layers, rows, marker=mark, ms=7, lw=2.2, color=COLOURS[name], label=label)
    shares.set_xticks(layers[::3])
    shares.set_xlabel("layer, from the input on")
    shares.set_ylabel("gradients that become 0 (%)")
    shares.set_title("What is lost, layer by layer")
    for name, run in losses.items():
        smooth = torch.tensor(run).unfold(0, 10, 1).mean(dim=1)
        style = {"color": COLOURS[name], "lw": 2.2, "ls": "--" if name == "fp32" else "-"}
        curves.plot(range(10, STEPS + 1), smooth, label=name, **style)
    curves.set_ylim(0, None)
    curves.set_xlabel("step")
    curves.set_ylabel("loss, mean of 10 steps")
    curves.set_title("What comes of it")
    for axes in (sizes, shares, curves):
        axes.legend(frameon=False, loc={sizes: "upper right", curves: "lower left"}.get(axes))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    out = parser.parse_args().out
    runs = {name: train(policy) for name, policy in RUNS.items()}
    losses = {name: run[0] for name, run in runs.items()}
    early = runs["fp16, dynamic scale"][1]
    found = [gradients(early, policy) for policy in ("fp32", UNSCALED, SCALED)]
    print_tables(losses, *found)
    plt = pyplot()
    if plt is not None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "underflow_and_scaling.png"
        draw(plt, losses, *found, path)
        print(f"figure: {path}")


if __name__ == "__main__":
    main()
