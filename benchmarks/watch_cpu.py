"""What ``watch`` or ``LayerHealth`` costs a step: measured, not, and on average at ``every=100``.

    python benchmarks/watch_cpu.py [--health] [--rounds N] [--policies NAME ...]

The model is gpt-small-cpu (6 layers, 384 wide) with a vocabulary of 8192, batch 8 x 256, on random
tokens. Two copies of it take steps in turn in one process: one without a watch, and one whose every
second step is watched, with a line of ``numerics.jsonl`` each. Ratios are medians over rounds of a
copy's step to the plain copy's step beside it. The end of an unwatched step attaches the hooks of a
watched one; that is in the figure at ``every=100``, a hundredth of what a watched step and the one
before it cost more than two plain ones.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import halfstep
from common import save
from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import Strategy
from halfstep.precision.step import Precision
from halfstep.trainer.environment import keep_freed_memory
from halfstep.trainer.step import train_step
from train_cpu import SHAPES, VOCABULARY, batch, make

SMALL = "gpt-small-cpu"


def stepper(policy: str, wrap: Callable[..., Any] = lambda loss_sum: loss_sum):
    """A step of the trainer's on a new copy of the model, and what it steps."""
    model, optimizer = make(SMALL, VOCABULARY, policy)
    precision = Precision(policy, model, optimizer)
    alone = Strategy(Layout(), precision.policy, torch.device("cpu"))
    batches, loss_sum = [batch(SHAPES[SMALL], VOCABULARY)], wrap(model.loss_sum)

    def step() -> float:
        begin = time.perf_counter()
        train_step(loss_sum, precision, alone, batches, learning_rate=lambda _: 1e-3,
                   max_norm=1.0)  # fmt: skip
        return time.perf_counter() - begin

    return model, precision, step


def measure(policy: str, rounds: int, folder: Path, health: bool) -> dict[str, object]:
    _, _, plain = stepper(policy)
    model, precision, watched = stepper(policy)
    path = folder / f"{policy}.jsonl"
    taken: list[tuple[float, float, float, float]] = []
    how = {"every": 2, "to": path, "start": 1000 if health else 0}
    kind = halfstep.LayerHealth if health else halfstep.watch
    with kind(model, precision, **how) as watch:
        for _ in range(4):
            watched(), plain()
        for _ in range(rounds):
            taken.append((plain(), watched(), plain(), watched()))
        found = () if health else watch.report().tensors
        counted, tensors = sum(one.elements for one in found), len(found)
    off = [quiet / before for before, quiet, _, _ in taken]
    on = [full / before for _, _, before, full in taken]
    more = [(b + d - a - c) / (a + c) * 2 / 100 for a, b, c, d in taken]
    return {
        "watched_over_plain": median(on), "watched_quartiles": quantiles(on, n=4)[::2],
        "unwatched_over_plain": median(off), "more_at_every_100": median(more),
        "plain_ms": 1e3 * median(a for a, *_ in taken), "tensors": tensors, "elements": counted,
        "bytes_per_line": path.stat().st_size // (rounds + 3), "rounds": rounds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--policies", nargs="*", default=["bf16-mixed", "bf16-split", "fp32"])
    parser.add_argument("--health", action="store_true", help="layer health, not watch")
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    keep_freed_memory()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for policy in arguments.policies:
            found[policy] = one = measure(policy, arguments.rounds, Path(name), arguments.health)
            low, high = one["watched_quartiles"]
            print(
                f"{policy:<12} watched / plain {one['watched_over_plain']:.3f} ({low:.3f} to "
                f"{high:.3f}), unwatched / plain {one['unwatched_over_plain']:.3f}, at every=100 "
                f"{one['more_at_every_100']:+.2%}; plain {one['plain_ms']:.0f} ms, "
                f"{one['tensors']} tensors, {one['elements'] / 1e6:.0f} M elements, "
                f"{one['bytes_per_line'] / 1e3:.0f} kB a line"
            )
    if not arguments.no_save:
        results = {"threads": torch.get_num_threads()}
        name = "health-cpu" if arguments.health else "watch-cpu"
        print(f"written: {save(name, results | {'steps': found}, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
