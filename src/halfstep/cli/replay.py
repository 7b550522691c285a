"""The command ``halfstep replay``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from halfstep.cli.commands import Replay
from halfstep.distributed.world import open_world
from halfstep.trainer.run.capture import Finding
from halfstep.trainer.run.replay import replay


def run(arguments: Replay) -> int:
    """Print what a captured step finds in a replay; 1 if it differs."""
    with open_world("cuda" if torch.cuda.is_available() else "cpu") as world:
        found = replay(Path(arguments.capture), arguments.precision, world)
    if not world.is_main:
        return 0
    if arguments.json:
        values: dict[str, Any] = asdict(found)
        values |= {"repeated": found.repeated, "survives": found.survives}
        print(json.dumps(_plain(values)))
    else:
        before, now = found.captured_precision, found.precision
        print(f"step {found.step} in {before}: {_found(found.captured)}")
        print(f"again in {now}: {_found(found.found)}")
        print(found.verdict)
    return 0 if found.repeated or found.precision != found.captured_precision else 1


def _found(found: Finding) -> str:
    return f"{found.reason}, loss {found.loss:.6g}, gradient norm {found.grad_norm:.6g}"


def _plain(value: Any) -> Any:
    """Numbers that JSON lacks as text."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
