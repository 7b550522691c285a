"""The commands ``bench`` and ``demo``: precision policies on this machine, one after the other."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from halfstep.cli.commands import Bench, Demo
from halfstep.cli.console import RunDisplay, megabytes
from halfstep.cli.grammar import read_words
from halfstep.errors import ConfigError, PrecisionError
from halfstep.files import write_whole
from halfstep.precision.casting.autocast import support
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import AUTO, parse_policy
from halfstep.report.findings import lost_shares
from halfstep.report.page import make_report
from halfstep.report.record import RunRecord, read_run
from halfstep.shown import aligned
from halfstep.trainer.config.config import config_to_toml, load_config, read_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import TASKS, TrainConfig
from halfstep.trainer.environment import choose_device

_WARM_UP = 3
"""First steps, whose times do not count: they allocate, compile and fill caches."""
_METER_EVERY = 8
"""Steps between two measurements of lost updates, whose times do not count either."""


def run(arguments: Bench) -> int:
    """Train a moment under each policy, and print a table; the demo also writes a page."""
    config = _config(arguments)
    policies = _policies(arguments, config)
    folder = time.strftime(f"runs/{type(arguments).__name__.lower()}-%Y%m%d-%H%M%S")
    root = Path(arguments.out or folder)
    records, refused = [], {}
    with RunDisplay("bench") as display:
        for policy in policies:
            display.say(str(policy))
            path = root / str(policy).replace("/", "-")
            done = train_apart(replace(config, precision=policy), path)
            if done.returncode == 0:
                records.append(read_run(path))
            else:
                why = [*done.stderr.splitlines(), ""][0] or str(done.returncode)
                refused[str(policy)] = why.removeprefix("halfstep: error: ")
    if not records:
        raise PrecisionError(f"no policy could be measured: {'; '.join(refused.values())}")
    print(table_of(records))
    for name, why in refused.items():
        print(f"{name}: {why}")
    if isinstance(arguments, Demo):
        report = make_report(records)
        if report.comparison:
            print("", *report.comparison.verdict, sep="\n")
        print(f"\nWritten: {report.write(root / 'report.html')}")
    return 0


def _policies(arguments: Bench, config: BaseConfig) -> list[PrecisionPolicy]:
    """The policies that are named; for a demo without any, what suits the device among others."""
    device, named = choose_device(config.run.device), arguments.precision
    if not named:
        fp16 = support("fp16-mixed", device).status != "refused"
        named = ("fp32", AUTO, *["fp16-mixed"] * fp16)
    return list(dict.fromkeys(parse_policy(text, device) for text in named))


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
        lost = max(lost_shares(record).values(), default=math.nan)
        rows.append(
            (
                record.name,
                f"{rates[-1]:,.0f}",
                f"{rates[-1] / rates[0]:.2f}",
                megabytes(record.series("peak_memory_bytes")[1][-1]),
                f"{fmean(losses[-max(1, len(losses) // 4) :]):.4f}",
                "-" if math.isnan(lost) else f"{lost:.1%}",
            )
        )
    return aligned(rows, range(1, len(rows[0])))


def train_apart(config: BaseConfig, folder: Path) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own, because peak memory and caches belong to a process."""
    config = replace(config, run=replace(config.run, output_dir=str(folder)))
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_name(f"{folder.name}.toml")
    write_whole(file, config_to_toml(config))
    words = [*config.COMMAND.split(), "--config", str(file), "--quiet"]
    return subprocess.run(
        [sys.executable, "-m", "halfstep", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip


def _config(arguments: Bench) -> BaseConfig:
    kind = TASKS.get(read_table(arguments.config)[1].get("task", TrainConfig.TASK), TrainConfig)
    if not kind.COMMAND:
        raise ConfigError(
            f"configuration {arguments.config} is of the task {kind.TASK}, whose model and data "
            "are in your program: bench measures runs of halfstep train and finetune"
        )
    given = read_words([*kind.COMMAND.split(), *arguments.words])[1].given
    config = load_config(arguments.config, list(given.items()))
    steps = arguments.steps
    run = replace(
        config.run, max_steps=steps, eval_every=steps, eval_batches=1, save_every=0,
        parallel="", lost_update_every=_METER_EVERY,
    )  # fmt: skip
    # at its peak soon, so that few steps teach something
    schedule = replace(config.schedule, warmup_steps=min(5, steps), decay="constant")
    return replace(config, run=run, schedule=schedule)
