"""The command ``halfstep demo``: trains the same model in several precisions and compares them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from halfstep.cli.commands import Demo
from halfstep.cli.console import megabytes
from halfstep.cli.formats import table
from halfstep.distributed.layout import Layout
from halfstep.distributed.select import choose_strategy
from halfstep.errors import ConfigError, HalfstepError
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.policy.devices import choose
from halfstep.precision.policy.spelling import AUTO, parse_policy
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.use import Generating
from halfstep.trainer.environment import choose_device
from halfstep.trainer.tasks.trained import open_trained

_COLUMNS = ("precision", "val loss", "tokens/s", "peak memory", "loss scale", "applied", "skipped",
            "seconds")  # fmt: skip


def run(arguments: Demo) -> int:
    """Train in each precision in a separate process, then print a sample and a table."""
    steps = arguments.max_steps
    if steps < 1:
        raise ConfigError(f"--max-steps {steps}; allowed: integers >= 1")
    device = choose_device(load_config(arguments.config).run.device)
    parsed = list(dict.fromkeys(parse_policy(text, device) for text in arguments.precisions))
    for policy in parsed:  # before the first run, which may take minutes
        require_support(policy, device)
        choose_strategy(Layout(), policy, device)
    policies = [str(policy) for policy in parsed]
    if AUTO in arguments.precisions:
        taken = choose(device)
        print(f"precision auto took {taken.policy}: {taken.reason}", file=sys.stderr)
        if len(parsed) < len(arguments.precisions):
            print("--precisions fp32 bf16-mixed compares two all the same", file=sys.stderr)
    root = Path(arguments.output_dir or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    runs = []
    for precision in policies:
        # A process each, because peak memory and caches belong to a process.
        begin = time.perf_counter()
        command = [sys.executable, "-m", "halfstep", "train", "--config", arguments.config]
        command += ["--precision", precision, "--max-steps", str(steps)]
        command += ["--eval-every", str(steps), "--save-every", "0"]
        command += ["--schedule.warmup_steps", str(min(20, steps))]
        command += ["--output-dir", str(root / precision)]
        code = _wait(subprocess.Popen(command))
        if code != 0:
            return code
        runs.append(_measured(root / precision, precision, time.perf_counter() - begin))
    sample = _sample(root / policies[-1])
    print(f"\nA sample of the {policies[-1]} model after {steps} steps:\n\n{sample}\n")
    print(table([_COLUMNS, *map(_cells, runs)], right=set(range(1, len(_COLUMNS)))))
    if len(runs) > 1:
        print(_savings(runs[0], runs[-1]))
    last, every = root / policies[-1], " ".join(str(root / policy) for policy in policies)
    print(f"\nRuns: {root}\nLook at them: halfstep report {every} --out {root / 'report.html'}")
    print(f"Ask the last for more: halfstep generate --run {last} --prompt 'def '")
    print(f"Go on: halfstep train --resume --output-dir {last} --max-steps {steps * 10}")
    return 0


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for a run, also after Ctrl-C, which the run gets too and answers by saving."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    try:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def _measured(folder: Path, precision: str, seconds: float) -> dict[str, Any]:
    """Return the record of a run's last step, with the median tokens per second of all steps."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    if not records:
        raise HalfstepError(f"{folder}: no step was taken")
    rate = median(record["tokens_per_second"] for record in records)
    own = {"precision": precision, "tokens_per_second": rate, "seconds": seconds}
    return {**records[-1], **own}


def _cells(run: dict[str, Any]) -> tuple[str, ...]:
    return (
        run["precision"],
        f"{run['val_loss']:.4f}",
        f"{run['tokens_per_second']:,.0f}",
        megabytes(run["peak_memory_bytes"]),
        f"{run['loss_scale']:g}",
        str(run["step"] - run["skipped_total"]),
        str(run["skipped_total"]),
        f"{run['seconds']:.0f}",
    )


def _savings(first: dict[str, Any], last: dict[str, Any]) -> str:
    speed = last["tokens_per_second"] / first["tokens_per_second"]
    memory = 1 - last["peak_memory_bytes"] / first["peak_memory_bytes"]
    loss = last["val_loss"] / first["val_loss"] - 1
    return (
        f"\n{last['precision']} against {first['precision']}: {speed:.2f} times the tokens per "
        f"second, {memory:.0%} less peak memory of the process, validation loss {loss:+.2%}"
    )


def _sample(folder: Path) -> str:
    use = Generating(
        run=str(folder), device="cpu", precision="fp32", prompt="def ", max_new_tokens=120,
        temperature=0.7, top_k=50,
    )  # fmt: skip
    return open_trained(use).generate(use)
