"""The command ``halfstep advise``: which formats below 16 bits a model tolerates."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from halfstep.cli.commands import Advise
from halfstep.cli.one_step import opened
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
    out = Path(arguments.out) if arguments.out else None
    if out is not None and (out.suffix != ".toml" or not out.parent.is_dir()):
        raise ConfigError(f"--out {out}; allowed: a file .toml in a folder that exists")
    with opened(arguments, REFERENCES.get(formats[0] if formats else "", "fp32"), "advise") as made:
        made.precision.close()
        task, config = made.task, made.config
        count = max(1, arguments.batches)
        rows = [range(task.batch_size(made.step + number)) for number in range(count)]
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
            device=arguments.rates,
            steps=arguments.steps,
            seeds=range(arguments.seeds),
            seconds=arguments.seconds,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    if out is not None:
        found.write(out)
    print(json.dumps(_plain(found), indent=1) if arguments.json else f"{found}")
    if out is not None and not arguments.json:
        print(f"\nWritten: {out}")
    return 0 if found.proved else UNPROVED


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ConfigError(f"--tolerance {text}; allowed: such as 0.3% or 0.003") from None


def _plain(found: Advice) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "proved": found.proved,
        "policy": found.policy,
        "saved": found.saved,
        "gap": None if found.gap is None else found.gap.mean,
        "bound": None if found.gap is None else found.gap.bound,
        "floor": found.floor,
        "exceptions": {name: list(forms) for name, forms in found.exceptions.items()},
    }
