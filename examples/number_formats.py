"""A format with half the bits gives up range or precision, and fp8 gives up both.

Look at each format's smallest positive and its largest number, and at the gap between neighbours:
bf16 has the range of fp32 with gaps 2^16 times as wide; fp16 has gaps 2^13 times as wide, but a
short range. Below the smallest normal number the gap no longer shrinks with the number, so relative
precision (on the right) is lost step by step until everything is 0.

Run: python examples/number_formats.py [--out FOLDER]
"""

import argparse
import math
from pathlib import Path

from halfstep.formats import FORMATS

# Okabe and Ito's palette, safe for colour-blind readers; https://jfly.uni-koeln.de/color
COLOURS = {
    "fp32": "#000000",
    "tf32": "#56B4E9",
    "bf16": "#0072B2",
    "fp16": "#D55E00",
    "e4m3fn": "#009E73",
    "e5m2": "#CC79A7",
    "e2m1": "#E69F00",
}


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


def power(value: float) -> str:
    return f"2^{math.log2(value):.0f}"


def print_table() -> None:
    print(
        f"{'format':<7} {'bits':>4} {'largest':>12} {'smallest normal':>16} "
        f"{'smallest positive':>18} {'gap at 1':>9} {'gap at 1000':>12}"
    )
    for form in FORMATS.values():
        far = power(form.ulp(1000.0)) if form.max >= 1000.0 else "beyond"
        print(
            f"{form.name:<7} {form.bits:>4} {form.max:>12.6g} {power(form.min_normal):>16} "
            f"{power(form.min_subnormal):>18} {power(form.eps):>9} {far:>12}"
        )


def draw(plt, path: Path) -> None:
    figure, (ranges, gaps, relative) = plt.subplots(1, 3, figsize=(17, 5.2), layout="constrained")
    for row, form in enumerate(FORMATS.values()):
        colour = COLOURS[form.name]
        low, normal, high = map(math.log2, (form.min_subnormal, form.min_normal, form.max))
        ranges.barh(row, high - normal, left=normal, color=colour, height=0.55)
        ranges.barh(row, normal - low, left=low, color=colour, height=0.55, alpha=0.35)
        ranges.text(low - 4, row, power(form.min_subnormal), ha="right", va="center")
        ranges.text(high + 4, row, f"{form.max:.3g}", ha="left", va="center")

        exponents = range(round(low), math.ceil(high))  # the gap changes at powers of two only
        heights = [math.log2(form.ulp(2.0**e)) for e in exponents]
        style = (0, (4, 3)) if form.name == "tf32" else "-"
        line = {"color": colour, "lw": 2.4, "ls": style, "label": form.name}
        line["zorder"] = 3 if form.name == "tf32" else 2
        gaps.stairs(heights, [*exponents, high], baseline=None, **line)
        ratios = [height - e for e, height in zip(exponents, heights, strict=True)]
        relative.plot(exponents, ratios, **line)
    ranges.set_yticks(range(len(FORMATS)), list(FORMATS))
    ranges.invert_yaxis()
    ranges.set_xlim(-225, 210)
    ranges.set_xticks(range(-150, 151, 50))
    ranges.set_xlabel("log2 of the magnitude (pale: subnormal)")
    ranges.set_title("What each format can hold")
    gaps.set(xlim=(-30, 18), ylim=(-54, 15))
    gaps.set_xlabel("log2 of the magnitude")
    gaps.set_ylabel("log2 of the gap between neighbours")
    gaps.set_title("Gaps, around 1")
    gaps.legend(frameon=False, loc="lower right")
    relative.set_xlabel("log2 of the magnitude")
    relative.set_ylabel("log2 of (gap / magnitude)")
    relative.set_title("Gaps relative to the number, everywhere")
    for axes in (gaps, relative):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    out = parser.parse_args().out
    print_table()
    plt = pyplot()
    if plt is not None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "number_formats.png"
        draw(plt, path)
        print(f"figure: {path}")


if __name__ == "__main__":
    main()
