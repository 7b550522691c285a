"""Measures policies on this machine with a run's own model, shapes and data."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.trainer.bench.report import BenchReport
from halfstep.trainer.bench.synthetic import with_data
from halfstep.trainer.bench.turns import Say, take_turns
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import ClassifyConfig
from halfstep.trainer.environment import choose_device
from halfstep.trainer.memory import memory_bytes

_REFERENCE = "fp32"


def bench(
    config: BaseConfig,
    policies: Sequence[PrecisionPolicy],
    *,
    steps: int = 0,
    seconds: float = 100.0,
    say: Say = lambda text: None,
) -> BenchReport:
    """Train under each policy for a moment, in turns, from the same weights on the same batches.

    Args:
        config: A run of ``halfstep train`` or ``finetune``. Its length, schedule, evaluations,
            checkpoints and layout have no meaning here; without training data it gets synthetic.
        policies: What to compare; one that this device refuses becomes a row that says why.
        steps: The most steps to count; 0: as many as fit.
        seconds: When to end, at the latest.
        say: Prints a line of progress.

    Returns:
        The report. fp32 comes first in it, if it is among the policies, else the first of them:
        the others are compared with that one.

    Raises:
        ConfigError: If there is no such device.
        DataError: If the configuration's tokenizer cannot be loaded.
    """
    begin = time.monotonic()
    until = begin + seconds - min(8.0, seconds / 10)  # the rest is for the report
    device = choose_device(config.run.device)
    ordered = sorted(dict.fromkeys(policies), key=lambda policy: str(policy) != _REFERENCE)
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        prepared = with_data(config, Path(folder))
        rows, together = take_turns(
            prepared, ordered, device, Path(folder), steps=steps, until=until, say=say
        )
    return BenchReport(
        rows,
        config.name,
        "examples" if isinstance(config, ClassifyConfig) else "tokens",
        str(device),
        memory_bytes(device),
        together,
        time.monotonic() - begin,
        prepared is not config,
    )
