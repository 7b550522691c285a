"""The command ``halfstep bench``: which precision policy to take on this machine."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from halfstep.cli.commands import BenchRequest
from halfstep.cli.console import megabytes
from halfstep.cli.formats import table
from halfstep.cli.grammar import leaves, option_name, short_options
from halfstep.cli.train import require_trust
from halfstep.cli.words import told
from halfstep.errors import ConfigError, PrecisionError
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.bench.bench import bench
from halfstep.trainer.bench.figure import draw
from halfstep.trainer.bench.report import BenchReport
from halfstep.trainer.bench.turns import Row
from halfstep.trainer.config.config import load_config, read_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import TASKS, ClassifyConfig, LMConfig, TrainConfig
from halfstep.trainer.environment import choose_device
from halfstep.words import said


def run(request: BenchRequest) -> int:
    """Measure the policies, print a table and a recommendation, and write both with a figure."""
    asked = request.bench
    config = _config(request)
    device = choose_device(config.run.device)
    policies = [parse_policy(text, device) for text in split_policies(asked.precision)]
    folder = Path(asked.out or f"runs/bench-{time.strftime('%Y%m%d-%H%M%S')}")

    def say(text: str) -> None:
        if not asked.quiet:
            print(text, file=sys.stderr, flush=True)

    with _writable(folder):
        report = bench(config, policies, steps=asked.steps, seconds=asked.seconds, say=say)
        if not report.measured:
            reasons = dict.fromkeys(said(row.why_not) for row in report.rows)
            why = told("separator").join(reasons)
            raise PrecisionError(told("none_measured", why=why))
    try:
        path = report.write(folder)
        missing = draw(report, folder / "bench.png")
    except OSError as error:
        raise _not_written(folder, error) from error
    if asked.json:
        print(json.dumps(report.to_json(), indent=1, allow_nan=False))
    else:
        print(text_of(report))
        print("\n" + (told("written", path=path) if missing else told("bench_drawn", path=path)))
    if missing:
        say(told("note", text=missing))
    return 0


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Make a folder before minutes of measurement, not after; without a result it goes again."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(folder, error) from error
    try:
        yield
    except BaseException:
        if new:
            folder.rmdir()
        raise


def _not_written(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(told("out_not_written", path=folder, error=error))


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
        raise ConfigError(told("names_no_policy"))
    return found


def _config(request: BenchRequest) -> BaseConfig:
    """Load the configuration to measure, of the task that the words name."""
    given, named = dict(request.given), request.bench.config
    kind: type[BaseConfig] = TrainConfig
    if named:
        kind = TASKS.get(read_table(named)[1].get("task", TrainConfig.TASK), TrainConfig)
    elif "model.source" in given:
        scratch = str(given["model.source"]).startswith("scratch:")
        kind = ClassifyConfig if scratch else LMConfig
    given = {_key_in(kind, key): value for key, value in given.items()}
    config = load_config(named or kind.shipped(given), list(given.items()))
    require_trust(given, config)
    if not config.COMMAND:
        raise ConfigError(told("bench_other_task", config=named, task=config.TASK))
    return config


def _key_in(kind: type[BaseConfig], key: str) -> str:
    """Return the key that an option means in a task, where another task's has the same name."""
    if key in {option.key for option in leaves(kind)}:
        return key
    return short_options(kind).get(option_name(key.rpartition(".")[2])[2:], key)


def text_of(report: BenchReport) -> str:
    """Format a report: a table, the rows that were not measured, and the recommendation."""
    head = (told("policy"), told(f"rate {report.unit}"), told("quartiles"), told("times"),
            told("one_step"), told("peak"), told("the_loss"), told("lost"), "")  # fmt: skip
    rows = [tuple(_cells(report, row)) for row in report.measured]
    reference = report.reference
    assert reference is not None
    known = {"name": report.name, "summary": reference.opened["summary"], "where": report.where}
    known["data"] = told("synthetic_data") if report.synthetic else told("your_data")
    parts = [
        told("bench_of", steps=report.timed, seconds=report.seconds, **known) + "\n",
        table([head, *rows], set(range(1, len(head) - 1))),
        *(
            "\n" + told("not_measured", policy=str(row.policy), why=row.why_not)
            for row in report.rows
            if row.why_not
        ),
        "\n" + said(report.recommendation()),
    ]
    return "\n".join(parts)


def _cells(report: BenchReport, row: Row) -> Iterator[str]:
    assert report.reference is not None
    rate = report.rate(row)
    yield str(row.policy)
    yield f"{rate.median:,.0f}"
    yield f"{rate.low:,.0f} - {rate.high:,.0f}"
    yield f"{rate.median / report.rate(report.reference).median:.2f}"
    yield f"{report.seconds_of(row).median * 1e3:,.0f} ms"
    yield megabytes(row.steps[-1].peak_memory_bytes)
    yield f"{report.loss(row):.4f}"
    lost = report.lost(row)
    yield "-" if math.isnan(lost) else f"{lost:.1%}"
    yield said(report.against(row))
