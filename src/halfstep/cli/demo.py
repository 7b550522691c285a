"""The command ``halfstep demo``: trains the same model in several precisions and compares them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from halfstep.cli.bench import prepare, table_of, train_apart
from halfstep.cli.commands import Demo
from halfstep.cli.console import RunDisplay
from halfstep.errors import ConfigError
from halfstep.precision.casting.autocast import require_support, support
from halfstep.precision.policy.spelling import AUTO, parse_policy
from halfstep.report.page import make_report
from halfstep.report.record import read_run
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.environment import choose_device

_WARMUP = 20


def run(arguments: Demo) -> int:
    """Train in each precision in a process of its own, then print and draw what came of it."""
    steps = arguments.max_steps
    keys = {"run.max_steps": steps, "run.eval_every": steps, "run.save_every": 0}
    keys["schedule.warmup_steps"] = min(_WARMUP, steps)
    config = load_config(arguments.config, [*keys.items()])
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"configuration {arguments.config} is of the task {config.TASK}; halfstep demo trains "
            "language models on text, as gpt-small-cpu and gpt-tiny do"
        )
    device = choose_device(config.run.device)
    parsed = [parse_policy(text, device) for text in arguments.precision or ("fp32", AUTO)]
    if not arguments.precision and support("fp16-mixed", device).status != "refused":
        parsed.append(parse_policy("fp16-mixed", device))
    policies = list(dict.fromkeys(parsed))
    for policy in policies:  # before the first run
        require_support(policy, device)
    root = Path(arguments.output_dir or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    with RunDisplay("demo") as display:
        prepare(config, display)
        names = ", ".join(map(str, policies))
        display.say(f"Training {config.name} for {steps} steps in {names}, one after the other")
    for policy in policies:
        done = train_apart(replace(config, precision=policy), root / str(policy), quiet=False)
        if done.returncode:
            return done.returncode
    records = [read_run(root / str(policy)) for policy in policies]
    print(table_of(records))
    report = make_report(records)
    if report.comparison:
        print("", *report.comparison.verdict, sep="\n")
    print(f"\nWritten: {report.write(root / 'report.html')}")
    return 0
