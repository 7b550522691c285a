"""The command ``halfstep replay``: run a captured step again."""

from __future__ import annotations

from pathlib import Path

import torch

from halfstep.cli.commands import Replay
from halfstep.distributed.world import open_world
from halfstep.trainer.replay import Finding, replay


def run(arguments: Replay) -> int:
    """Print what a captured step finds in a replay; 1 if it differs."""
    with open_world("cuda" if torch.cuda.is_available() else "cpu") as world:
        found = replay(Path(arguments.capture), arguments.precision, world)
    if not world.is_main:
        return 0
    print(f"step {found.step} in {found.captured_precision}: {_text(found.captured)}")
    print(f"again in {found.precision}: {_text(found.found)}")
    print(found.verdict)
    return 0 if found.repeated or found.precision != found.captured_precision else 1


def _text(found: Finding) -> str:
    return f"{found.reason}, loss {found.loss:.6g}, gradient norm {found.grad_norm:.6g}"
