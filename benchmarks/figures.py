"""Figures that stand alone, as README and the documentation show them."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from halfstep.report.page import GRID, INK, PAPER

# A picture that stands alone is a white card, which is read on light and on dark pages alike.
_ALONE = {INK: "#24292f", PAPER: "#ffffff", GRID: "#d8dee4"}
_BROWSER_FONTS = (
    "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'Noto Sans', 'PingFang SC', "
    "'Microsoft YaHei', 'Noto Sans CJK SC', sans-serif"
)
_CHINESE_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "PingFang SC", "Microsoft YaHei"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "SimHei", "Heiti TC"),
)


@contextmanager
def fonts_of(language: str) -> Iterator[str]:
    """Draw with fonts that have a language's characters; gives the language that can be drawn.

    It is English where no installed font is known to have Chinese characters.
    """
    from matplotlib import font_manager, rc_context

    there = {font.name for font in font_manager.fontManager.ttflist}
    chinese = [name for name in _CHINESE_FONTS if name in there][: language == "zh"]
    with rc_context({"font.family": ["DejaVu Sans", *chinese]}):
        yield language if chinese else "en"


def standalone_svg(figure: Any, salt: str) -> str:
    """A figure as an SVG file of its own, with concrete colours and fonts that browsers have.

    Args:
        figure: From :func:`new_figure`, in :data:`INK`, :data:`PAPER`, :data:`GRID` and
            :data:`COLOURS`.
        salt: Makes the names of its parts, so that the same figure is the same file.
    """
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    svg = written.getvalue()
    for ours, shown in _ALONE.items():
        svg = re.sub(re.escape(ours), shown, svg, flags=re.IGNORECASE)
    return re.sub(r"(font-family: |font: [^;\"]*?px )[^;\"]*", rf"\g<1>{_BROWSER_FONTS}", svg)
