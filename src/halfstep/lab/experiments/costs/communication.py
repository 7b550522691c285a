"""Bytes of gradients that data-parallel ranks send, and what 16 bits on the wire cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from halfstep.errors import PeerError
from halfstep.lab.experiment import Data, Experiment, Say
from halfstep.lab.experiments.costs import rank
from halfstep.lab.figure import COLOURS, LETTERS, at_end, finish
from halfstep.report.figures import INK
from halfstep.trainer.config.read import AtLeast1, Range

Ranks = Annotated[int, Range("integers from 2 to 8", lambda x: 2 <= x <= 8)]
LIMIT_SECONDS = 300
SMALL = 0.1
"""An error below this share of what another batch changes is small."""
LEAST = 0.001
"""Per cent of error at the left end of the figure."""


@dataclass(frozen=True)
class Options:
    """Ranks, the GPT's width, and the micro-batches of a step."""

    ranks: Ranks = 2
    width: AtLeast1 = 128
    micro_batches: AtLeast1 = 1


def measure(options: Options) -> Data:
    """Start the ranks, which sum a gradient in each format.

    Raises:
        PeerError: If a rank fails, with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="halfstep-") as folder:
        order = {**asdict(options), "meet": str(Path(folder, "meet"))}
        safe = [] if os.getcwd() in sys.path else ["-P"]  # the module path of this process
        started = [
            subprocess.Popen(
                [sys.executable, *safe, "-m", rank.__name__, json.dumps({**order, "rank": number})],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for number in range(options.ranks)
        ]
        try:
            written = [each.communicate(timeout=LIMIT_SECONDS) for each in started]
        finally:
            for each in started:
                each.kill()
    for each, (_, error) in zip(started, written, strict=True):
        if each.returncode:
            raise PeerError(f"a rank of the experiment failed: {error.strip()[-500:]}")
    found = json.loads(written[0][0].splitlines()[-1])
    return {"ranks": options.ranks, "micro_batches": options.micro_batches, **found}


def draw(figure: Any, data: Data, say: Say) -> None:
    """Bytes above, errors below, beside what another batch changes."""
    above, below = figure.subplots(2)
    wires = [*data["sent"]]
    for row, wire in enumerate(wires):
        size = data["sent"][wire] / 1e6
        above.barh(row, size, 0.6, color=COLOURS[wire])
        at_end(above, size, row, f"{size:.2f} MB")
    above.set_yticks(range(len(wires)), [f"reduce={wire}" for wire in wires])
    finish(above, say("sent"), title=say("sent_title", ranks=data["ranks"]))
    for row, wire in enumerate(wires):
        error = 100 * data["error"][wire]
        if wire == wires[0]:
            at_end(below, LEAST, row, say("exact"))
            continue
        below.plot(error, row, "o", color=COLOURS[wire], ms=11)
        at_end(below, 1.2 * error, row, f"{error:.2g}%")
    noise = 100 * data["noise"]
    below.axvline(noise, color=INK, lw=2, ls="--")
    right = {"ha": "right", "va": "center", "fontsize": LETTERS - 1.5}
    below.text(noise / 1.2, len(wires) - 1.5, say("noise", noise=data["noise"]), **right)
    below.set_yticks(range(len(wires)), [f"reduce={wire}" for wire in wires])
    below.set_ylim(-0.6, len(wires) - 0.4)
    below.set_xscale("log")
    finish(below, say("error"), title=say("error_title"))
    for axes in (above, below):
        axes.invert_yaxis()
        axes.set_axisbelow(True)
    above.set_xlim(0, 1.2 * max(data["sent"].values()) / 1e6)
    below.set_xlim(LEAST, 1000)
    shown = (0.01, 0.1, 1, 10, 100)
    below.set_xticks(shown, [f"{each:g}" for each in shown])
    below.minorticks_off()
    below.yaxis.grid(visible=False)


def verdict(data: Data, say: Say) -> str:
    """Bytes with and without 16 bits, and the error beside what another batch changes."""
    small = data["error"]["bf16"] < SMALL * data["noise"]
    return say(
        "verdict" if small else "verdict_large",
        ranks=data["ranks"],
        bf16=data["sent"]["bf16"] / 1e6,
        fp32=data["sent"]["fp32"] / 1e6,
        error=data["error"]["bf16"],
        noise=data["noise"],
    )


EXPERIMENT = Experiment("communication", Options, measure, draw, verdict, size=(6.2, 5.2))
