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
from halfstep.lab.figure import COLOURS, at_end, finish
from halfstep.trainer.config.read import AtLeast1, Range

Ranks = Annotated[int, Range("integers from 2 to 8", lambda x: 2 <= x <= 8)]
LIMIT_SECONDS = 300
SMALL = 0.1
"""An error below this share of what another batch changes is small."""


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
    errors = {f"reduce={wire}": (data["error"][wire], COLOURS[wire]) for wire in wires[1:]}
    errors[say("noise")] = (data["noise"], "#999999")
    for row, (error, colour) in enumerate(errors.values()):
        below.barh(row, 100 * error, 0.6, color=colour)
        at_end(below, 100 * error, row, f"{100 * error:.3g}%")
    below.set_yticks(range(len(errors)), [*errors])
    below.set_xscale("log")
    finish(below, say("error"), title=say("error_title"))
    for axes in (above, below):
        axes.invert_yaxis()
        axes.set_axisbelow(True)
    above.set_xlim(0, 1.2 * max(data["sent"].values()) / 1e6)
    below.set_xlim(0.001, 1000)


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
