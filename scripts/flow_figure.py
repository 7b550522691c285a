"""Draw the step of mixed precision into docs/figures/flow.svg and flow.zh.svg.

Both languages share one geometry. The drawing brings its own background for light and for dark
pages, and is narrow enough for a telephone: 400 units with letters of 13.
"""
# ruff: noqa: RUF001

from __future__ import annotations

from html import escape
from pathlib import Path

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
WORDS = {
    "title": ("One step of mixed-precision training", "混合精度训练的一步"),
    "master": ("master weights", "主权重"),
    "cast": ("rounded to 16 bits", "舍入到 16 位"),
    "weights": ("weights for the products", "参与矩阵乘的权重"),
    "forward": ("forward", "前向"),
    "islands": ("norms, softmax, loss in fp32", "归一化、softmax、损失用 fp32"),
    "loss": ("loss", "损失"),
    "scale": ("loss × S", "损失 × S"),
    "backward": ("backward", "反向"),
    "gradients": ("gradients × S", "梯度 × S"),
    "unscale": ("gradients ÷ S", "梯度 ÷ S"),
    "finite": ("all finite?", "全部有限？"),
    "yes": ("yes", "是"),
    "no": ("no", "否"),
    "update": ("clip, optimizer step", "裁剪，优化器更新"),
    "grow": ("after N good steps: S ← 2S", "连续 N 步正常后：S ← 2S"),
    "skip": ("skip the step", "跳过这一步"),
    "stay": ("weights stay", "权重不变"),
    "halve": ("S ← S ÷ 2", "S ← S ÷ 2"),
    "batch": ("next batch", "下一批数据"),
    "writes": ("writes", "写回"),
    "16": ("16 bits", "16 位"),
    "fp32": ("fp32", "fp32"),
}
STYLE = """
svg { --page: #ffffff; --ink: #1f2328; --line: #57606a;
  --wide: #ddf4ff; --wide-edge: #0969da; --half: #fff1e5; --half-edge: #bc4c00;
  --stop: #ffebe9; --stop-edge: #cf222e; }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --ink: #e6edf3; --line: #9198a1;
  --wide: #0c2d6b; --wide-edge: #58a6ff; --half: #4a2206; --half-edge: #f0883e;
  --stop: #5c1016; --stop-edge: #ff7b72; } }
text { fill: var(--ink); font: 13px "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei",
  system-ui, sans-serif; }
.small { font-size: 12px; } .middle { text-anchor: middle; } .right { text-anchor: end; }
.title { font-weight: 600; } .page { fill: var(--page); }
.wide { fill: var(--wide); stroke: var(--wide-edge); stroke-width: 2; }
.half { fill: var(--half); stroke: var(--half-edge); stroke-dasharray: 6 3; stroke-width: 1.5; }
.stop { fill: var(--stop); stroke: var(--stop-edge); }
.line { fill: none; stroke: var(--line); stroke-width: 1.5; marker-end: url(#tip); }
.tip { fill: var(--line); }
"""
LEFT, WIDTH, CENTRE = 48, 224, 160
SIDE, SIDE_WIDTH = 294, 98


class Drawing:
    """The lines of an SVG, with words of one language."""

    def __init__(self, language: int) -> None:
        self.language = language
        self.lines: list[str] = []

    def words(self, name: str) -> str:
        """A phrase in the drawing's language, escaped."""
        return escape(WORDS[name][self.language])

    def text(self, x: float, y: float, name: str, kind: str = "middle") -> None:
        """A phrase at a point."""
        self.lines.append(f'<text x="{x}" y="{y}" class="{kind}">{self.words(name)}</text>')

    def box(self, y: float, name: str, bits: str, below: str | None = None) -> None:
        """A box of the main column: what happens, in which format, and a second line."""
        height = 50 if below else 34
        kind = "wide" if bits == "fp32" else "half"
        self.lines.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{height}" rx="6" class="{kind}"/>'
        )
        self.text(LEFT + 10, y + 22, name, "")
        self.text(LEFT + WIDTH - 10, y + 22, bits, "small right")
        if below:
            self.text(LEFT + 10, y + 41, below, "small")

    def arrow(self, path: str) -> None:
        """A line along an SVG path that ends in a tip."""
        self.lines.append(f'<path d="{path}" class="line"/>')

    def down(self, start: float, end: float, name: str | None = None) -> None:
        """An arrow down the main column, with a word beside it."""
        self.arrow(f"M{CENTRE} {start}V{end - 2}")
        if name:
            self.text(CENTRE + 9, (start + end) / 2 + 4, name, "small")


def flow(language: int) -> str:
    """The drawing as SVG: ``language`` is 0 for English, 1 for Chinese."""
    it = Drawing(language)
    it.text(200, 24, "title", "middle title")
    it.box(40, "master", "fp32")
    it.down(74, 104, "cast")
    it.box(104, "weights", "16")
    it.down(138, 158)
    it.box(158, "forward", "16", "islands")
    it.down(208, 238, "loss")
    it.box(238, "scale", "fp32")
    it.down(272, 292)
    it.box(292, "backward", "16")
    it.down(326, 356, "gradients")
    it.box(356, "unscale", "fp32")
    it.down(390, 410)
    it.lines.append(f'<path d="M{CENTRE} 410l72 30l-72 30l-72-30z" class="wide"/>')
    it.text(CENTRE, 445, "finite")
    it.down(470, 500, "yes")
    it.box(500, "update", "fp32", "grow")
    it.arrow(f"M{LEFT} 525H22V57H{LEFT - 2}")
    it.lines.append(
        f'<text transform="translate(16 300) rotate(-90)" class="small middle">'
        f"{it.words('writes')}</text>"
    )
    it.arrow(f"M232 440H{SIDE - 2}")
    it.text(258, 432, "no", "small")
    it.lines.append(
        f'<rect x="{SIDE}" y="405" width="{SIDE_WIDTH}" height="70" rx="6" class="stop"/>'
    )
    middle = SIDE + SIDE_WIDTH / 2
    for y, name in ((425, "skip"), (444, "stay"), (463, "halve")):
        it.text(middle, y, name, "small middle")
    it.arrow(f"M{middle} 405V202")
    it.lines.append(
        f'<rect x="{SIDE}" y="166" width="{SIDE_WIDTH}" height="34" rx="6" class="page" '
        'stroke="var(--line)"/>'
    )
    it.text(middle, 188, "batch", "small middle")
    it.arrow(f"M{SIDE} 183H{LEFT + WIDTH + 2}")
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 566" width="480" height="679" '
        f'role="img" aria-label="{it.words("title")}">\n<style>{STYLE}</style>\n'
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" class="tip"/>'
        '</marker></defs>\n<rect width="400" height="566" rx="8" class="page"/>\n'
        + "\n".join(it.lines)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    for language, name in enumerate(("flow.svg", "flow.zh.svg")):
        (FIGURES / name).write_text(flow(language), encoding="utf-8")
