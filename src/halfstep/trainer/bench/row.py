"""One policy's process in a measurement: ``python -m halfstep.trainer.bench.row``.

It speaks JSON, a line each way. It says that it is there, reads an order, opens the run and answers
what it opened; from then on each line that it reads is a turn, in which it takes one step of the
trainer's own loop, and which it answers with a :class:`StepLine`. It ends with its input.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import HalfstepError
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.trainer.config.config import config_from_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.data.progress import no_progress
from halfstep.trainer.environment import keep_freed_memory
from halfstep.trainer.loop import train
from halfstep.trainer.session import Session, open_session
from halfstep.words import Told, message, phrase_of, texts_of

_told = Told("halfstep.trainer.bench")

REFUSED = "refused"
"""Key of the line in place of any answer, with which a row ends: an error's message by language."""
_ENDLESS = 10**6
_METER_EVERY = 8
"""Steps between two measurements of lost updates, whose times do not count."""
_WARM_UP = 5
"""Steps in which the learning rate rises to its peak."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """What a row tells about a step."""

    seconds: float
    """Of everything that the trainer does for a step: data, forward, backward, update, metrics."""
    rows: int
    """Sequences or examples of its batch."""
    tokens: int
    """Their tokens, without padding."""
    loss: float
    """Nats per target, before the step; NaN where there was none."""
    applied: bool
    """Whether the weights were updated."""
    peak_memory_bytes: int
    """Of the process so far; on CUDA of its tensors."""
    lost: float | None
    """If the step was measured: the share of updates that rounding swallowed, in the parameter
    group that lost most."""


def config_of_row(config: BaseConfig, policy: PrecisionPolicy) -> BaseConfig:
    """Return the configuration with which a policy is measured.

    It is the run's, without an end and without evaluations, checkpoints and loggers on the way. The
    learning rate is at its peak after 5 steps, so that few steps teach something.
    """
    run = dataclasses.replace(
        config.run, max_steps=_ENDLESS, max_seconds=0.0, eval_every=_ENDLESS, save_every=0,
        patience=0, report_to=(), parallel="", sequence_parallel=False, agree_every=0,
        lost_update_every=_METER_EVERY, watch=0, output_dir="",
    )  # fmt: skip
    schedule = dataclasses.replace(config.schedule, warmup_steps=_WARM_UP, decay="constant")
    return dataclasses.replace(config, precision=policy, run=run, schedule=schedule)


def main() -> None:
    """Measure in turns until the input ends."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere

    def say(line: Mapping[str, Any]) -> None:
        said.write(json.dumps(line) + "\n")
        said.flush()

    say({})
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return
    try:
        keep_freed_memory()
        session = open_session(config_from_table(order["config"]), no_progress)
        say(_opened(session))
        _take_turns(session, Path(order["folder"]), say)
    except (HalfstepError, torch.OutOfMemoryError, MemoryError) as error:
        why = message(error)
        if not isinstance(error, HalfstepError):
            why = _told.phrase("out_of_memory", error=error)
        say({REFUSED: texts_of(why)})
    said.flush()
    os._exit(0)  # a save at the end, or the interpreter's own end, would only take time


def _opened(session: Session) -> dict[str, Any]:
    support = session.precision.support
    return {
        "summary": texts_of(phrase_of(session.task.summary)),
        "support": texts_of(support.how),
        "threads": torch.get_num_threads(),
    }


def _take_turns(session: Session, folder: Path, say: Callable[[Mapping[str, Any]], None]) -> None:
    folder.mkdir(exist_ok=True)
    ticks = train(session, folder)
    while sys.stdin.readline():
        before, rows = session.tokens, session.task.batch_size(session.step)
        begin = time.perf_counter()
        record = next(ticks).record
        seconds = time.perf_counter() - begin
        line = StepLine(
            seconds=seconds,
            rows=rows,
            tokens=session.tokens - before,
            loss=float("nan") if record.loss is None else record.loss,
            applied=record.applied,
            peak_memory_bytes=record.peak_memory_bytes or 0,
            lost=max(record.lost_updates.values()) if record.lost_updates else None,
        )
        say(dataclasses.asdict(line))


if __name__ == "__main__":
    main()
