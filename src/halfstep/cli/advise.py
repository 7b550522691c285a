"""The command ``halfstep advise``: which formats below 16 bits a model tolerates."""

from __future__ import annotations

import json
import math
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch

from halfstep.cli.commands import Advise
from halfstep.cli.one_step import opened
from halfstep.cli.words import told
from halfstep.diagnostics.advise.advice import Advice, advise
from halfstep.diagnostics.advise.layers import REFERENCES
from halfstep.errors import ConfigError
from halfstep.trainer.step import to_device

UNPROVED = 3
"""The exit code where no run proved the advice."""


def run(arguments: Advise) -> int:
    """Print the advice, and write it as a policy file; 3 where it is not proved."""
    tolerance = _share(arguments.tolerance)
    formats = [f for word in arguments.formats for f in word.split(",") if f]
    rates = _rates(arguments.rates)
    out = Path(arguments.out) if arguments.out else None
    if out is not None and (out.suffix != ".toml" or out.is_dir() or not _writable(out.parent)):
        raise ConfigError(told("out_is_no_policy_file", path=out))
    with opened(arguments, REFERENCES.get(formats[0] if formats else "", "fp32"), "advise") as made:
        made.precision.close()
        task, config = made.task, made.config
        rows = [range(task.batch_size(made.step + n)) for n in range(arguments.batches)]
        batches = [
            to_device(task.batch(made.step + number, part), made.device)
            for number, part in enumerate(rows)
        ]
        rate = config.optimizer.learning_rate

        def loss(model: Any, batch: Any) -> torch.Tensor:
            total, targets = model.loss_sum(batch)
            mean: torch.Tensor = total / targets
            return mean

        found = advise(
            task.model,
            batches,
            loss,
            formats,
            tolerance,
            rates=rates,
            steps=arguments.steps,
            seeds=range(arguments.seeds),
            seconds=arguments.seconds,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    print(json.dumps(_plain(found), indent=1) if arguments.json else f"{found}", flush=True)
    if out is not None:
        found.write(out)
        if not arguments.json:
            print("\n" + told("written", path=out))
    return 0 if found.proved else UNPROVED


def _writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK)


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ConfigError(told("no_tolerance", text=text)) from None


def _rates(text: str) -> str | dict[str, float]:
    if not text.endswith(".toml"):
        return text
    try:
        return tomllib.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(told("no_rates", path=text, error=error)) from None


def _finite(gap: float) -> float | None:
    """The gap, or None where a run broke: JSON has no infinity."""
    return gap if math.isfinite(gap) else None


def _plain(found: Advice) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "proved": found.proved,
        "policy": found.policy,
        "saved": found.saved,
        "gap": None if found.gap is None else _finite(found.gap.mean),
        "bound": None if found.gap is None else _finite(found.gap.bound),
        "floor": found.floor,
        "needed": {name: _finite(gap) for name, gap in found.needed.items()},
        "exceptions": {name: list(forms) for name, forms in found.exceptions.items()},
    }
