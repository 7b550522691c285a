"""The command ``halfstep bench``: precision policies on this machine, one run after the other."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from halfstep.cli.commands import Bench
from halfstep.cli.console import RunDisplay, megabytes
from halfstep.cli.grammar import read_words
from halfstep.cli.train import require_trust
from halfstep.diagnostics.lost_updates import lost_share
from halfstep.errors import ConfigError, PrecisionError
from halfstep.files import write_whole
from halfstep.precision.policy.spelling import parse_policy
from halfstep.report.record import RunRecord, read_run
from halfstep.shown import aligned
from halfstep.trainer.config.config import config_to_toml, load_config, read_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import TASKS, TrainConfig
from halfstep.trainer.environment import choose_device
from halfstep.trainer.session import open_session

_WARM_UP = 3
"""First steps, whose times do not count: they allocate, compile and fill caches."""
_METER_EVERY = 8
"""Steps between two measurements of lost updates, whose times do not count either."""


def run(arguments: Bench) -> int:
    """Train a moment under each policy, and print a table."""
    config = _config(arguments)
    device = choose_device(config.run.device)
    policies = [parse_policy(text, device) for text in arguments.precision]
    root = Path(arguments.out or f"runs/bench-{time.strftime('%Y%m%d-%H%M%S')}")
    records, refused = [], {}
    with RunDisplay("bench") as display:
        prepare(config, display)
        for policy in policies:
            display.say(str(policy))
            folder = root / str(policy).replace("/", "-")
            done = train_apart(replace(config, precision=policy), folder, quiet=True)
            if done.returncode == 0:
                records.append(read_run(folder))
            else:
                why = [*done.stderr.splitlines(), ""][0] or str(done.returncode)
                refused[str(policy)] = why.removeprefix("halfstep: error: ")
    if not records:
        raise PrecisionError(f"no policy could be measured: {'; '.join(refused.values())}")
    print(table_of(records))
    for name, why in refused.items():
        print(f"{name}: {why}")
    return 0


def table_of(records: Sequence[RunRecord]) -> str:
    """Align what runs cost as a table: the median speed, and its ratio to the first run's.

    The loss is the mean training loss of the last quarter of the steps; lost, the share of updates
    that rounding swallowed in the parameter group that lost most.
    """
    rates, rows = [], [("policy", "tokens/s", "times", "peak memory", "loss", "lost")]
    for record in records:
        timed = [line for line in record.steps[_WARM_UP:] if not line.get("lost_updates")]
        rates.append(median(line["tokens_per_second"] for line in timed or record.steps[-1:]))
        losses = record.series("loss")[1]
        numbers, learning = record.series("learning_rate")
        at = dict(zip(numbers, learning, strict=True))
        shares = [
            lost_share(
                ((at[step], share) for step, share in zip(*group, strict=True)), max(learning)
            )
            for group in record.groups("lost_updates").values()
        ]
        lost = max(filter(math.isfinite, shares), default=None)
        rows.append(
            (
                record.name,
                f"{rates[-1]:,.0f}",
                f"{rates[-1] / rates[0]:.2f}",
                megabytes(record.series("peak_memory_bytes")[1][-1]),
                f"{fmean(losses[-max(1, len(losses) // 4) :]):.4f}",
                "-" if lost is None else f"{lost:.1%}",
            )
        )
    return aligned(rows, range(1, len(rows[0])))


def prepare(config: BaseConfig, display: RunDisplay) -> int:
    """Prepare the data, so that it counts for no run's memory; return the model's parameters."""
    session = open_session(replace(config, precision=parse_policy("fp32")), display.prepared)
    try:
        return sum(p.numel() for p in session.task.model.parameters())
    finally:
        session.task.close()
        session.precision.close()


def train_apart(
    config: BaseConfig, folder: Path, *, quiet: bool
) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own, because peak memory and caches belong to a process.

    Args:
        config: The run, without a folder.
        folder: For the run; it does not exist.
        quiet: Keep what the run says on stderr, instead of passing it on.
    """
    config = replace(config, run=replace(config.run, output_dir=str(folder)))
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_name(f"{folder.name}.toml")
    write_whole(file, config_to_toml(config))
    words = [*config.COMMAND.split(), "--config", str(file)]
    words += ["--trust-remote-code"] * config.runs_foreign_code
    return subprocess.run(
        [sys.executable, "-m", "halfstep", *words, *["--quiet"] * quiet],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE if quiet else None, text=True,
        check=False,
    )  # fmt: skip


def _config(arguments: Bench) -> BaseConfig:
    """Load the configuration to measure, short and without an evaluation on the way."""
    kind = TASKS.get(read_table(arguments.config)[1].get("task", TrainConfig.TASK), TrainConfig)
    if not kind.COMMAND:
        raise ConfigError(
            f"configuration {arguments.config} is of the task {kind.TASK}, whose model and data "
            "are in your program: bench measures runs of halfstep train and finetune"
        )
    given = read_words([*kind.COMMAND.split(), *arguments.words])[1].given
    config = load_config(arguments.config, list(given.items()))
    require_trust(given, config)
    steps = arguments.steps
    run = replace(
        config.run, max_steps=steps, eval_every=steps, eval_batches=1, save_every=0, report_to=(),
        parallel="", lost_update_every=_METER_EVERY, simulate=False,
    )  # fmt: skip
    # at its peak soon, so that few steps teach something
    schedule = replace(config.schedule, warmup_steps=min(5, steps), decay="constant")
    return replace(config, run=run, schedule=schedule)
