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
from halfstep.cli.words import told
from halfstep.diagnostics.capture import Finding, Replayed, is_sealed, replay as replay_of_loop
from halfstep.distributed.world import World, open_world
from halfstep.errors import ConfigError
from halfstep.trainer.run.replay import replay
from halfstep.words import said


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
        known = {"step": found.step, "found": _found(found.captured)}
        print(told("captured_in", policy=before, **known))
        print(told("again_in", policy=now, found=_found(found.found)))
        print(said(found.verdict))
    return 0 if found.repeated or found.precision != found.captured_precision else 1


def _replayed(arguments: Replay, world: World) -> Replayed:
    path = Path(arguments.capture)
    of_loop = is_sealed(path)
    if not of_loop:
        if arguments.model:
            raise ConfigError(told("model_is_known", model=arguments.model, path=path))
        return replay(path, arguments.precision, world)
    if not arguments.model:
        raise ConfigError(told("model_is_missing", path=path, made=told("made")))
    made = _function(arguments.model)()
    if not isinstance(made, tuple) or len(made) != 3:
        known = {"model": arguments.model, "kind": type(made).__name__}
        raise ConfigError(told("model_returned", made=told("made"), **known))
    model, optimizer, loss = made
    precision = arguments.precision
    return replay_of_loop(
        path, model, optimizer, lambda batch: loss(model, batch), precision=precision
    )


def _function(name: str) -> Callable[[], Any]:
    """The function that the user named; its module may be in the present folder."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(told("model_is_no_name", model=name, made=told("made")))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(told("model_not_imported", model=name, error=error)) from error
    if not callable(found):
        known = {"model": name, "kind": type(found).__name__}
        raise ConfigError(told("model_is_no_function", made=told("made"), **known))
    function: Callable[[], Any] = found
    return function


def _found(found: Finding) -> str:
    return told("found", reason=found.reason, loss=found.loss, norm=found.grad_norm)


def _plain(value: Any) -> Any:
    """Numbers that JSON lacks as text."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
