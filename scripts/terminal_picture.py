r"""Runs a command, and draws the command and what it prints as a picture of a terminal.

    python scripts/terminal_picture.py docs/figures/nan.svg halfstep train --config gpt-tiny \
        --precision fp16-mixed --learning-rate 10 --max-steps 20 --output-dir runs/nan

The picture is a file of its own: text in whatever monospaced font the reader has, nothing fetched.
Long lines are wrapped between words, and paths in this repository are told from its root.
"""

from __future__ import annotations

import html
import io
import re
import subprocess
import sys
from pathlib import Path
from shlex import join
from textwrap import fill, wrap

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from halfstep.shown import columns

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 100
LOUD = (("halfstep: error:", "bold red"), ("first cause:", "bold yellow"), ("to do:", "bold green"),
        ("try:", "bold cyan"))  # fmt: skip
"""What the reader is to see first."""


def picture(words: list[str], printed: str, code: int) -> str:
    """A terminal as SVG in which a command has printed something and ended with a code."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(fill(f"$ {join(words)}", COLUMNS, subsequent_indent="    "), "bold"))
    for line in printed.splitlines():
        text = Text("\n".join(wrap(line, COLUMNS, break_on_hyphens=False)))
        for loud, style in LOUD:
            broken = r"\n?".join(map(re.escape, loud)).replace(r"\ ", r"\s")
            text.highlight_regex(broken, style)
        console.print(text, no_wrap=True)
    console.print(Text(f"$ echo $?\n{code}", "bold"))
    svg = console.export_svg(title=" ".join(words[:2]), theme=MONOKAI, unique_id="terminal")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'textLength="([\d.]+)"([^>]*)>([^<]*)<', _in_columns, svg)
    return svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def _in_columns(found: re.Match[str]) -> str:
    """A run of text as wide as its columns; rich counts a wide character as one."""
    length, rest, text = found.groups()
    plain = html.unescape(text)
    wide = float(length) * columns(plain) / max(1, len(plain))
    return f'textLength="{wide:g}"{rest}>{text}<'


def main() -> int:
    """Run the command of the arguments, and write its picture to the first of them."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    path, words = Path(sys.argv[1]), sys.argv[2:]
    command = [sys.executable, "-m", *words] if words[0] == "halfstep" else words
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    path.write_text(
        picture(words, done.stdout.replace(f"{ROOT}/", ""), done.returncode), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
