"""The command ``halfstep demo``: trains the same model in several precisions and compares them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from shlex import join
from statistics import quantiles

import torch

from halfstep.cli.bench import prepare, train_apart
from halfstep.cli.commands import Demo
from halfstep.cli.console import RunDisplay, megabytes
from halfstep.cli.formats import table
from halfstep.errors import ConfigError
from halfstep.files import write_whole
from halfstep.precision.casting.autocast import Support, require_support, support
from halfstep.precision.policy.devices import kind_of, name_of
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import AUTO, parse_policy
from halfstep.report.record import read_run
from halfstep.report.side_by_side import Side, Trial, draw, verdict
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.environment import choose_device

_WARMUP = 20


def run(arguments: Demo) -> int:
    """Train in each precision in a process of its own, then print and draw what came of it."""
    steps = arguments.max_steps
    if steps < 1:
        raise ConfigError(f"--max-steps {steps}; allowed: integers >= 1")
    keys = {"run.max_steps": steps, "run.eval_every": steps, "run.save_every": 0}
    keys["schedule.warmup_steps"] = min(_WARMUP, steps)
    config = load_config(arguments.config, [*keys.items()])
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"configuration {arguments.config} is of the task {config.TASK}; halfstep demo trains "
            "language models on text, as gpt-small-cpu and gpt-tiny do"
        )
    device = choose_device(config.run.device)
    policies = _policies(arguments.precisions, device)
    root = Path(arguments.output_dir or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    kind = kind_of(device)
    named = f"{name_of(device)} ({kind.family})" if kind else name_of(device)
    with RunDisplay("demo") as display:
        count = prepare(config, display)
        trial = Trial(model=config.name, parameters=count, steps=steps, device=named)
        names = ", ".join(map(str, policies))
        display.say(f"Training {trial.text()}, in {names}, one after the other")
    sides = []
    for policy in policies:
        folder, begin = root / str(policy), time.perf_counter()
        done = train_apart(replace(config, precision=policy), folder, quiet=False)
        if done.returncode:
            return done.returncode
        sides.append(_side(folder, policy, support(policy, device), time.perf_counter() - begin))
    values = {"trial": asdict(trial), "sides": [asdict(side) for side in sides]}
    write_whole(root / "demo.json", f"{json.dumps(values, indent=1)}\n")
    figures = draw(sides, trial, root)
    titles = (
        "precision", "products", "val loss", "tokens/s", "peak memory",
        "skipped", "seconds",
    )  # fmt: skip
    print(table([titles, *map(_cells, sides)], right=set(range(2, len(titles)))))
    if len(sides) > 1:
        print(f"\n{verdict(sides)}")
    if figures:
        print(f"\nFigure: {figures[0]}")
    report = join(["halfstep", "report", *(str(root / str(policy)) for policy in policies)])
    print(f"\nNext: {report}")
    return 0


def _policies(asked: tuple[str, ...], device: torch.device) -> list[PrecisionPolicy]:
    """The policies to train in, each once, refused where the device cannot honour one."""
    parsed = [parse_policy(text, device) for text in asked or ("fp32", AUTO)]
    if not asked and support("fp16-mixed", device).status != "refused":
        parsed.append(parse_policy("fp16-mixed", device))
    for policy in parsed:
        require_support(policy, device)
    return list(dict.fromkeys(parsed))


def _side(folder: Path, policy: PrecisionPolicy, how: Support, seconds: float) -> Side:
    """What a finished run's record says."""
    record = read_run(folder)
    steps, losses = record.series("loss")
    rates = record.series("tokens_per_second")[1]
    low, middle, high = quantiles([*rates, *rates], n=4, method="inclusive")  # one step is enough
    return Side(
        precision=str(policy),
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
    how = "simulated" if side.simulated else "native"
    numbers = f"{side.val_loss:.4f}", f"{side.rate:,.0f}", megabytes(side.peak_bytes)
    return side.precision, how, *numbers, str(side.skipped), f"{side.seconds:.0f}"
