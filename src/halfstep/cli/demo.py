"""The command ``halfstep demo``: trains the same model in several precisions and compares them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import join
from statistics import quantiles
from typing import Any

import torch

from halfstep.cli.commands import Demo
from halfstep.cli.console import RunDisplay, megabytes
from halfstep.cli.formats import table
from halfstep.cli.words import told
from halfstep.diagnostics.recording.metrics import METRICS
from halfstep.distributed.layout import Layout
from halfstep.distributed.select import choose_strategy
from halfstep.errors import ConfigError, HalfstepError
from halfstep.files import write_whole
from halfstep.precision.casting.autocast import Support, require_support, support
from halfstep.precision.policy.devices import choose, kind_of, name_of, status_text
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import AUTO, parse_policy
from halfstep.report.record import read_run
from halfstep.report.side_by_side import Side, Trial, draw, verdict
from halfstep.trainer.bench.figure import MISSING
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.environment import choose_device
from halfstep.trainer.session import open_session
from halfstep.words import Told, said, spoken

_LOOK_SECONDS = 0.5
_WARMUP = 20


def run(arguments: Demo) -> int:
    """Train in each precision in a process of its own, then print and draw what came of it."""
    steps, language = arguments.max_steps, spoken()
    if steps < 1:
        raise ConfigError(f"--max-steps {steps}; allowed: integers >= 1")
    device = choose_device(load_config(arguments.config).run.device)
    policies = _policies(arguments.precisions, device)
    root = Path(arguments.output_dir or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    keys = {"run.max_steps": steps, "run.eval_every": steps, "run.save_every": 0}
    keys["schedule.warmup_steps"] = min(_WARMUP, steps)
    sides = []
    with RunDisplay("demo") as display:
        trial = _checked(display, arguments.config, keys, policies)
        names = ", ".join(map(str, policies))
        display.say(told("demo_begins", trial=trial.text(language), policies=names))
        for policy in policies:
            folder, begin = root / str(policy), time.perf_counter()
            command = [sys.executable, "-m", "halfstep", "train", "--config", arguments.config]
            own = {**keys, "precision": policy, "run.output_dir": folder}
            command += [f"--{key}={value}" for key, value in own.items()]
            # A process each, because peak memory and caches belong to a process.
            child = subprocess.Popen([*command, "--quiet"], stdout=subprocess.DEVNULL)
            code = _wait(child, _follower(display, folder, str(policy), steps))
            if code != 0:
                return code
            sides.append(
                _side(folder, str(policy), support(policy, device), time.perf_counter() - begin)
            )
    values = {"trial": asdict(trial), "sides": [asdict(side) for side in sides]}
    write_whole(root / "demo.json", f"{json.dumps(values, indent=1)}\n")
    figures = draw(sides, trial, root, language)
    titles = (
        told("precision"), told("products"), told("val_loss"), told("rate tokens"), told("peak"),
        told("skipped"), told("seconds"),
    )  # fmt: skip
    print(table([titles, *map(_cells, sides)], right=set(range(2, len(titles)))))
    if len(sides) > 1:
        print(f"\n{verdict(sides, language)}")
    print("\n" + (told("figure", path=figures[0]) if figures else said(MISSING)))
    folders = [str(root / str(policy)) for policy in policies]
    fastest = root / max(sides, key=lambda side: side.rate).precision
    report = join(["halfstep", "report", *folders, "--out", str(root / "report.html")])
    generate = join(["halfstep", "generate", "--run", str(fastest), "--prompt", "def "])
    print(told("next_commands", report=report, generate=generate))
    return 0


def _policies(asked: Sequence[str], device: torch.device) -> list[PrecisionPolicy]:
    """The policies to train in, each once, refused where the device cannot honour one."""
    texts = [*asked]
    if not texts:
        texts = ["fp32", AUTO]
        texts += ["fp16-mixed"] * (support("fp16-mixed", device).status != "refused")
    parsed = list(dict.fromkeys(parse_policy(text, device) for text in texts))
    for policy in parsed:
        require_support(policy, device)
        choose_strategy(Layout(), policy, device)
    if AUTO in texts:
        taken = choose(device)
        auto = Told("halfstep.trainer")("auto_took", precision=taken.policy, reason=taken.reason)
        print(auto, file=sys.stderr)
    return parsed


def _checked(
    display: RunDisplay, config: str, keys: Mapping[str, Any], policies: Sequence[PrecisionPolicy]
) -> Trial:
    """Prepare the data, and refuse before the first run whatever a run would refuse.

    The data is prepared here, so that it counts for the memory and the seconds of no run.

    Returns:
        What is trained.
    """
    for policy in policies:
        asked = load_config(config, [*keys.items(), ("precision", str(policy))])
        if not isinstance(asked, TrainConfig):
            raise ConfigError(
                f"configuration {config} is of the task {asked.TASK}; halfstep demo trains "
                "language models on text, as gpt-small-cpu and gpt-tiny do"
            )
        session = open_session(asked, display.prepared)
        parameters = sum(p.numel() for p in session.task.model.parameters())
        device, kind = session.device, kind_of(session.device)
        session.task.close()
    named = f"{name_of(device)} ({kind.family})" if kind else name_of(device)
    return Trial(model=asked.name, parameters=parameters, steps=keys["run.max_steps"], device=named)


def _follower(display: RunDisplay, folder: Path, name: str, steps: int) -> Callable[[], None]:
    """Return a function that shows how far a run is, by its metrics."""

    def look() -> None:
        if not (folder / METRICS).exists():
            return
        records = read_run(folder).steps
        if records:
            last = records[-1]
            text = told(
                "demo_step", step=last["step"], steps=steps, loss=last["loss"],
                rate=last["tokens_per_second"],
            )  # fmt: skip
            display.shown(name, last["step"], steps, text)

    return look


def _wait(child: subprocess.Popen[bytes], look: Callable[[], None]) -> int:
    """Wait for a run, also after Ctrl-C, which the run gets too and answers by saving."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    try:
        while True:
            try:
                return child.wait(_LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                look()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def _side(folder: Path, precision: str, how: Support, seconds: float) -> Side:
    """What a finished run's record says."""
    record = read_run(folder)
    if not record.steps:
        raise HalfstepError(f"{folder}: no step was taken")
    steps, losses = record.series("loss")
    _, rates = record.series("tokens_per_second")
    low, middle, high = quantiles([*rates, *rates], n=4, method="inclusive")  # one step is enough
    return Side(
        precision=precision,
        simulated=how.status == "simulated",
        steps=steps,
        losses=losses,
        val_loss=record.series("val_loss")[1][-1],
        rate=middle,
        quartiles=(low, high),
        peak_bytes=int(record.series("peak_memory_bytes")[1][-1]),
        skipped=len(record.skipped),
        seconds=seconds,
    )


def _cells(side: Side) -> tuple[str, ...]:
    return (
        side.precision,
        said(status_text("simulated" if side.simulated else "native")),
        f"{side.val_loss:.4f}",
        f"{side.rate:,.0f}",
        megabytes(side.peak_bytes),
        str(side.skipped),
        f"{side.seconds:.0f}",
    )
