"""Seconds of a training step beside programs that use the cores, by threads and OMP_WAIT_POLICY.

    python benchmarks/busy_machine.py [--config gpt-small-cpu] [--neighbours 0 1 2] [--steps 5]

Each row is a process that trains under bf16-mixed for some steps, beside so many processes that
compute without pause. "waiting" is the share of the time that the step's slowest thread was ready
to run and had no core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch

from common import save
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.bench.bench import bench
from halfstep.trainer.config.config import load_config


def settings() -> list[tuple[int, str]]:
    """Threads and OMP_WAIT_POLICY: as torch chooses, the same asleep at barriers, and one less."""
    cores = torch.get_num_threads()
    return [(cores, ""), (cores, "passive"), (max(1, cores - 1), "")]


def measure(config_name: str, threads: int, wait: str, steps: int) -> dict[str, float]:
    """Median seconds of a step, its quartiles, and the share of waiting."""
    os.environ.pop("OMP_WAIT_POLICY", None)
    if wait:
        os.environ["OMP_WAIT_POLICY"] = wait
    config = load_config(config_name, [("run.threads", threads), ("run.device", "cpu")])
    report = bench(config, [parse_policy("bf16-mixed")], steps=steps, seconds=600)
    (row,) = report.measured
    return {**report.seconds_of(row)._asdict(), "waiting": report.waiting or 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="gpt-small-cpu")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    rows = []
    print(
        f"{'neighbours':>10} {'threads':>8} {'OMP_WAIT_POLICY':>16} {'step (s)':>9} {'waiting':>8}"
    )
    for neighbours in arguments.neighbours:
        for threads, wait in settings():
            spinning = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
                for _ in range(neighbours)
            ]
            try:
                found = measure(arguments.config, threads, wait, arguments.steps)
            finally:
                for process in spinning:
                    process.kill()
                    process.wait()
            rows.append({"neighbours": neighbours, "threads": threads, "wait": wait, **found})
            print(
                f"{neighbours:>10} {threads:>8} {wait or '-':>16} {found['median']:>9.2f} "
                f"{found['waiting']:>8.0%}",
                flush=True,
            )
    if not arguments.no_save:
        results = {"config": arguments.config, "policy": "bf16-mixed", "rows": rows}
        print(f"\nwritten: {save('busy-machine', results, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
