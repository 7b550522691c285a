"""The command ``halfstep replay``: take a captured step of a run again."""

from __future__ import annotations

from pathlib import Path

import torch

from halfstep.cli.commands import Replay
from halfstep.diagnostics.capture import Finding, is_sealed
from halfstep.distributed.world import open_world
from halfstep.errors import ConfigError
from halfstep.trainer.run.replay import replay


def run(arguments: Replay) -> int:
    """Print what a captured step finds when it is taken again; 1 if it differs."""
    path = Path(arguments.capture)
    if is_sealed(path):
        raise ConfigError(
            f"{path} is a capture of a loop of your own, which does not say how its model is "
            "made: call halfstep.replay(path, model, optimizer, loss) in your program"
        )
    with open_world("cuda" if torch.cuda.is_available() else "cpu") as world:
        found = replay(path, arguments.precision, world)
    if not world.is_main:
        return 0
    print(f"step {found.step} in {found.captured_precision}: {_text(found.captured)}")
    print(f"again in {found.precision}: {_text(found.found)}")
    print(found.verdict)
    return 0 if found.repeated or found.precision != found.captured_precision else 1


def _text(found: Finding) -> str:
    return f"{found.reason}, loss {found.loss:.6g}, gradient norm {found.grad_norm:.6g}"
