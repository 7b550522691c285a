"""The command ``halfstep replay``."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from halfstep.cli.commands import Replay
from halfstep.diagnostics.capture import Finding, Replayed, is_sealed, replay as replay_of_loop
from halfstep.distributed.world import World, open_world
from halfstep.errors import ConfigError
from halfstep.trainer.run.replay import replay


def run(arguments: Replay) -> int:
    """Print what a captured step finds when it is taken again; 1 if it differs."""
    with open_world("cuda" if torch.cuda.is_available() else "cpu") as world:
        found = _replayed(arguments, world)
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


def _replayed(arguments: Replay, world: World) -> Replayed:
    path = Path(arguments.capture)
    of_loop = is_sealed(path)
    if not of_loop:
        if arguments.model:
            raise ConfigError(
                f"--model {arguments.model}: {path} is no capture of a loop of one's own; the run "
                "of halfstep train says itself what its model is. Leave --model out"
            )
        return replay(path, arguments.precision, world)
    if not arguments.model:
        raise ConfigError(
            f"{path} is a capture of a loop of one's own, which does not say how its model is "
            "made: give --model PACKAGE.MODULE:FUNCTION, a function of no arguments that returns "
            "(model, optimizer, loss)"
        )
    made = _function(arguments.model)()
    if not isinstance(made, tuple) or len(made) != 3:
        raise ConfigError(
            f"--model {arguments.model} returned {type(made).__name__}; allowed: a function of no "
            "arguments that returns (model, optimizer, loss), where loss(model, batch) computes "
            "a micro-batch's loss"
        )
    model, optimizer, loss = made
    precision = arguments.precision
    return replay_of_loop(
        path, model, optimizer, lambda batch: loss(model, batch), precision=precision
    )


def _function(name: str) -> Callable[[], Any]:
    """The function that the user named; its module may be in the present folder."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(
            f"--model {name}; allowed: PACKAGE.MODULE:FUNCTION, a function of no arguments that "
            "returns (model, optimizer, loss)"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--model {name} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(
            f"--model {name} is a {type(found).__name__}; allowed: a function of no arguments "
            "that returns (model, optimizer, loss)"
        )
    function: Callable[[], Any] = found
    return function


def _found(found: Finding) -> str:
    return f"{found.reason}, loss {found.loss:.6g}, gradient norm {found.grad_norm:.6g}"


def _plain(value: Any) -> Any:
    """Numbers that JSON lacks as text."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
