"""Long sums need an fp32 accumulator: a 16-bit one drifts, and then stops growing altogether.

Look at the sums that stand still: once half the gap between neighbours is larger than the term,
adding it changes nothing. So 4,096 ones add up to 2048 in fp16 and 256 in bf16. A matrix product
consists of such sums: with 16-bit operands and an fp32 accumulator its error is that of one final
rounding; with a 16-bit accumulator it grows with the length of the sum.

Run: python examples/fp32_accumulation.py [--out FOLDER]
"""

import argparse
from pathlib import Path

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Start value, term, number of terms.
SUMS = ((0.0, 1e-3, 1000), (4.0, 0.01, 256), (0.0, 1.0, 4096))
LENGTHS = (16, 64, 256, 1024, 4096)
# Okabe and Ito's palette, safe for colour-blind readers; https://jfly.uni-koeln.de/color
COLOURS = {"fp16": "#D55E00", "bf16": "#0072B2", "fp32": "#000000"}


def running_sum(start: float, term: float, count: int, dtype: torch.dtype) -> list[float]:
    """Return the accumulator after each addition, each of which rounds to ``dtype`` once."""
    total, addend = torch.tensor(start, dtype=dtype), torch.tensor(term, dtype=dtype)
    totals = []
    for _ in range(count):
        total = total + addend
        totals.append(total.item())
    return totals


def product(a: torch.Tensor, b: torch.Tensor, accumulator: torch.dtype) -> torch.Tensor:
    """Multiply 16-bit (m, k) by (k, n), adding one k at a time; round to 16 bits at the end.

    Each product of two 16-bit numbers is exact in fp32, so only the additions round.
    """
    total = torch.zeros(a.shape[0], b.shape[1], dtype=accumulator)
    for column, row in zip(a.float().unbind(1), b.float().unbind(0), strict=True):
        total = (total.float() + column[:, None] * row).to(accumulator)
    return total.to(a.dtype)


def product_error(dtype: torch.dtype, length: int, accumulator: torch.dtype) -> float:
    """Measure the relative error of a product of positive numbers against fp64 (Frobenius norm)."""
    generator = torch.Generator().manual_seed(length)
    a = torch.rand(16, length, generator=generator).to(dtype)
    b = torch.rand(length, 16, generator=generator).to(dtype)
    exact = a.double() @ b.double()
    return float((product(a, b, accumulator).double() - exact).norm() / exact.norm())


def print_sums() -> dict[str, list[float]]:
    print(f"{'sum':<22} {'exact':>8} {'fp16':>10} {'bf16':>10} {'fp32':>10}")
    curves = {}
    for start, term, count in SUMS:
        runs = {name: running_sum(start, term, count, dtype) for name, dtype in DTYPES.items()}
        ends = "".join(f" {run[-1]:>10.7g}" for run in runs.values())
        print(f"{f'{start:g} + {count} x {term:g}':<22} {start + count * term:>8g}{ends}")
        curves = curves or runs
    return curves


def print_products() -> dict[str, list[float]]:
    print(f"\n{'relative error of a product':<32}" + "".join(f"{f'k={k}':>10}" for k in LENGTHS))
    errors = {}
    for name in ("fp16", "bf16"):
        for accumulator in (name, "fp32"):
            row = [product_error(DTYPES[name], k, DTYPES[accumulator]) for k in LENGTHS]
            errors[f"{name} operands, {accumulator} sums"] = row
    for label, row in errors.items():
        print(f"{label:<32}" + "".join(f"{error:>10.1e}" for error in row))
    return errors


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


def draw(plt, curves: dict[str, list[float]], errors: dict[str, list[float]], path: Path) -> None:
    figure, (sums, products) = plt.subplots(1, 2, figsize=(14, 5.4), layout="constrained")
    _, term, count = SUMS[0]
    for name, totals in curves.items():
        sums.plot(range(1, count + 1), totals, color=COLOURS[name], lw=2.4, label=name)
        side = {"fp32": "bottom", "bf16": "center", "fp16": "top"}[name]
        sums.text(count + 8, totals[-1], f"{totals[-1]:.6g}", va=side, color=COLOURS[name])
    sums.set_xlim(0, count * 1.16)
    sums.set_xlabel(f"terms of {term:g} added")
    sums.set_ylabel("sum in the accumulator")
    sums.set_title("The same terms, three accumulators")
    for label, row in errors.items():
        name, wide = label[:4], label.endswith("fp32 sums")
        products.plot(
            LENGTHS, row, color=COLOURS[name], lw=2.4, ls="--" if wide else "-",
            marker="o" if wide else "s", ms=7, label=label,
        )  # fmt: skip
    products.set_xscale("log", base=2)
    products.set_yscale("log", base=10)
    products.set_xticks(LENGTHS, [str(k) for k in LENGTHS])
    products.set_xlabel("k, the number of terms in each sum of the product")
    products.set_ylabel("relative error against fp64")
    products.set_title("A product of 16-bit matrices")
    for axes in (sums, products):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    out = parser.parse_args().out
    curves, errors = print_sums(), print_products()
    plt = pyplot()
    if plt is not None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "fp32_accumulation.png"
        draw(plt, curves, errors, path)
        print(f"figure: {path}")


if __name__ == "__main__":
    main()
