"""Updates below half a gap vanish in bf16, unless something keeps what rounding cuts off.

A weight of 1.0 gets 100 updates of 0.001 and should end at 1.1. Near 1 the gap between bf16 numbers
is 2^-7 = 0.0078, so each update alone rounds to nothing. Look at the column "kept": plain bf16
stays at 1.0; an fp32 master and the 16-bit remainder of bf16-split keep the fp32 sum bit for bit;
a Kahan residual keeps nearly all of it; stochastic rounding keeps it on average, while each run is
off by a few gaps. Except in the fp32 row, the weight that the forward pass sees is always bf16.

Run: python examples/small_updates.py [--out FOLDER]
"""

import argparse
from pathlib import Path

import torch

from halfstep.optim import SGD

START, UPDATE, STEPS, SEEDS = 1.0, 1e-3, 100, 64
TRUTH = START + STEPS * UPDATE
# Okabe and Ito's palette, safe for colour-blind readers; https://jfly.uni-koeln.de/color
STYLES = {
    "fp32": ("#000000", "-"),
    "bf16": ("#D55E00", "-"),
    "bf16-split": ("#56B4E9", (0, (5, 3))),
    "bf16-kahan": ("#CC79A7", (0, (2, 2))),
    "bf16-sr": ("#0072B2", "-"),
}
# Bytes per weight, without gradients and moments.
BYTES = {"fp32": 4, "bf16": 2, "fp32 master": 6, "bf16-split": 4, "bf16-kahan": 4, "bf16-sr": 2}


def run() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return, by method, (weight, kept) after every step, fp64, (STEPS + 1, runs).

    ``weight`` is what the forward pass sees, ``kept`` what the next update is added to. All methods
    have one run, stochastic rounding one for every seed.
    """
    exact, _ = train(torch.float32)
    seeds = [train(torch.bfloat16, "stochastic", seed) for seed in range(SEEDS)]
    return {
        "fp32": (exact, exact),
        "bf16": train(torch.bfloat16, "nearest"),
        "fp32 master": (exact.bfloat16().double(), exact),
        "bf16-split": train(torch.bfloat16, "split"),
        "bf16-kahan": train(torch.bfloat16, "kahan"),
        "bf16-sr": tuple(torch.cat(part, dim=1) for part in zip(*seeds, strict=True)),
    }


def train(dtype: torch.dtype, update: str | None = None, seed: int = 0) -> tuple:
    """Return the weight, and what the optimizer keeps of it, before and after every step."""
    weight = torch.nn.Parameter(torch.tensor([START], dtype=dtype))
    optimizer = SGD([weight], lr=UPDATE, update=update, seed=seed)
    seen, kept = [], []
    for _ in range(STEPS + 1):
        seen.append(weight.detach().double())
        kept.append(optimizer.read_master(weight).double())
        optimizer.step(gradients={weight: torch.tensor([-1.0])})
    return torch.stack(seen), torch.stack(kept)


def print_table(results: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    print(f"{'method':<12} {'bytes':>5} {'weight':>10} {'kept':>10} {'kept - 1.1':>11}  spread")
    for name, (weight, kept) in results.items():
        end = kept[-1]
        spread = f"{end.std():.4f} over {len(end)} seeds" if len(end) > 1 else "-"
        print(
            f"{name:<12} {BYTES[name]:>5} {weight[-1].mean():>10.7f} {end.mean():>10.7f} "
            f"{end.mean() - TRUTH:>11.1e}  {spread}"
        )


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


def draw(plt, results: dict[str, tuple[torch.Tensor, torch.Tensor]], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.6), sharey=True, layout="constrained")
    steps = range(STEPS + 1)
    for axes, column in ((left, 1), (right, 0)):
        for name in ("fp32", "bf16", "bf16-split", "bf16-kahan"):
            colour, style = STYLES[name]
            values = results[name][column][:, 0]
            label = "fp32, or an fp32 master" if name == "fp32" else name
            axes.plot(steps, values, color=colour, ls=style, lw=2.6, label=label)
        runs, colour = results["bf16-sr"][column], STYLES["bf16-sr"][0]
        axes.plot(steps, runs[:, :6], color=colour, lw=0.8, alpha=0.35)
        axes.plot(steps, runs.mean(dim=1), color=colour, lw=2.6, label=f"bf16-sr, {SEEDS} seeds")
        axes.set_xlabel("updates of 0.001")
        axes.grid(alpha=0.3)
    left.set_ylabel("weight")
    left.set_title("What is kept: the next update is added to this")
    right.set_title("What the forward pass sees")
    left.legend(frameon=False, loc="upper left", title="thin: single seeds of bf16-sr")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    out = parser.parse_args().out
    results = run()
    print_table(results)
    plt = pyplot()
    if plt is not None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "small_updates.png"
        draw(plt, results, path)
        print(f"figure: {path}")


if __name__ == "__main__":
    main()
