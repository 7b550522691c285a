"""The command ``halfstep replay``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfstep.cli.commands import Replay
from halfstep.trainer.run.capture import Finding
from halfstep.trainer.run.replay import Replayed, replay


def run(arguments: Replay) -> int:
    """Print what a captured step finds when it is taken again; 1 if it differs."""
    found = replay(Path(arguments.capture), arguments.precision)
    same_precision = found.precision == found.captured_precision
    if arguments.json:
        values: dict[str, Any] = asdict(found)
        values |= {"repeated": found.repeated, "survives": found.survives}
        print(json.dumps(_plain(values)))
    else:
        print(f"step {found.step} in {found.captured_precision}: {_told(found.captured)}")
        print(f"again in {found.precision}: {_told(found.found)}")
        print(_verdict(found, same_precision))
    return 0 if found.repeated or not same_precision else 1


def _told(found: Finding) -> str:
    return f"{found.reason}, loss {found.loss:.6g}, gradient norm {found.grad_norm:.6g}"


def _verdict(found: Replayed, same_precision: bool) -> str:
    if not same_precision:
        what = "would have survived" if found.survives else "would not have survived"
        return f"{found.precision} {what}"
    if found.repeated:
        return "the step repeats bit for bit: the batch, the weights or the model make it"
    return "the step does not repeat: another machine, another torch, or a fault that is gone"


def _plain(value: Any) -> Any:
    """Numbers that JSON lacks as text."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
