"""The command ``halfstep bench``: precision policies on this machine, one run after the other."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

from halfstep.cli.commands import Bench
from halfstep.cli.console import RunDisplay, megabytes
from halfstep.cli.formats import table
from halfstep.cli.grammar import read_words
from halfstep.cli.train import require_trust
from halfstep.diagnostics.lost_updates.report import lost_share
from halfstep.errors import ConfigError, PrecisionError
from halfstep.files import write_whole
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.report.record import read_run
from halfstep.trainer.config.config import config_to_toml, load_config, read_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import TASKS, TrainConfig
from halfstep.trainer.environment import choose_device
from halfstep.trainer.session import open_session

_WARM_UP = 3
"""First steps, whose times do not count: they allocate, compile and fill caches."""
_METER_EVERY = 8
"""Steps between two measurements of lost updates, whose times do not count either."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one policy's run cost."""

    policy: str
    tokens_per_second: float
    """The median over the steps."""
    peak_memory_bytes: int
    loss: float
    """The mean training loss of the last quarter of the steps."""
    lost: float | None
    """The share of updates that rounding swallowed, in the parameter group that lost most."""


def run(arguments: Bench) -> int:
    """Train a moment under each policy, and print a table."""
    config = _config(arguments)
    device = choose_device(config.run.device)
    policies = [parse_policy(text, device) for text in split_policies(arguments.precision)]
    root = Path(arguments.out or f"runs/bench-{time.strftime('%Y%m%d-%H%M%S')}")
    with RunDisplay("bench", quiet=arguments.quiet) as display:
        prepare(config, display)
        rows, refused = [], {}
        for policy in policies:
            display.say(str(policy))
            folder = root / str(policy).replace("/", "-")
            done = train_apart(replace(config, precision=policy), folder, quiet=True)
            if done.returncode == 0:
                rows.append(_row(folder, policy))
            else:
                last = [*done.stderr.splitlines(), ""][0] or str(done.returncode)
                refused[str(policy)] = last.removeprefix("halfstep: error: ")
    if not rows:
        raise PrecisionError(f"no policy could be measured: {'; '.join(refused.values())}")
    if arguments.json:
        found = {"rows": [asdict(row) for row in rows], "not_measured": refused}
        print(json.dumps(found, indent=1))
        return 0
    head = ("policy", "tokens/s", "times", "peak memory", "loss", "lost")
    print(table([head, *(_cells(row, rows[0]) for row in rows)], set(range(1, len(head)))))
    for policy_name, why in refused.items():
        print(f"{policy_name}: {why}")
    return 0


def split_policies(words: Sequence[str]) -> list[str]:
    """Split words at commas into policies; ``key=value`` belongs to the policy before it.

    Raises:
        ConfigError: If there is none.
    """
    found: list[str] = []
    for word in words:
        first = True
        for part in filter(None, (part.strip() for part in word.split(","))):
            if "=" in part and not first:
                found[-1] += f",{part}"
            else:
                found.append(part)
            first = False
    if not found:
        raise ConfigError("--precision names no policy; halfstep explain lists them")
    return found


def prepare(config: BaseConfig, display: RunDisplay) -> int:
    """Prepare the data, so that it counts for no run's memory; return the model's parameters."""
    fp32 = replace(config, precision=parse_policy("fp32"))
    session = open_session(fp32, display.prepared)
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


def _row(folder: Path, policy: PrecisionPolicy) -> Row:
    record = read_run(folder)
    losses = record.series("loss")[1]
    timed = [line for line in record.steps[_WARM_UP:] if not line.get("lost_updates")]
    rates = [line["tokens_per_second"] for line in timed or record.steps[-1:]]
    numbers, learning = record.series("learning_rate")
    at = dict(zip(numbers, learning, strict=True))
    shares = [
        lost_share(((at[step], share) for step, share in zip(*found, strict=True)), max(learning))
        for found in record.groups("lost_updates").values()
    ]
    return Row(
        policy=str(policy),
        tokens_per_second=median(rates),
        peak_memory_bytes=int(record.series("peak_memory_bytes")[1][-1]),
        loss=fmean(losses[-max(1, len(losses) // 4) :]),
        lost=max(filter(math.isfinite, shares), default=None),
    )


def _cells(row: Row, first: Row) -> tuple[str, ...]:
    return (
        row.policy,
        f"{row.tokens_per_second:,.0f}",
        f"{row.tokens_per_second / first.tokens_per_second:.2f}",
        megabytes(row.peak_memory_bytes),
        f"{row.loss:.4f}",
        "-" if row.lost is None else f"{row.lost:.1%}",
    )
