"""What the trainer adds to the arithmetic of a tiny model, and how long it takes to start.

    python benchmarks/overhead.py [--rounds N] [--policies NAME ...] [--starts N]

``halfstep train`` runs a 0.1 M-parameter GPT (2 layers, width 64, 256 tokens, batches of 4 x 64),
on which a step is short enough for everything around it to show. After each of its steps the same
process takes one of a bare torch loop: the same network and loss, ``torch.autocast`` where the
policy is mixed and bf16 weights where it is split, ``clip_grad_norm_``, fused AdamW, and batches
that lie ready in memory. A ratio is that of two steps beside each other, the trainer's over the
bare one; its median and quartiles are printed. A second ratio is that of spans of 50 steps, of
which each holds one measurement of lost updates. The trainer's step holds all that the command
does: data, metrics and their file, the lost-update meter, and ranks' agreement.

The start is the wall time of ``halfstep train`` from the process's start to its first finished
step, with data, kernels and byte code prepared by a run before.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

SHAPE = {"n-layer": 2, "n-head": 2, "n-embd": 64, "block-size": 64, "model.block_size": 64,
         "batch-size": 4}  # fmt: skip
WARM_UP, RATE = 20, 1e-3
POLICIES = ("fp32", "bf16-mixed", "bf16-split")


def words(folder: Path, run: str, policy: str, steps: int) -> list[str]:
    """The command's words; it prepares the data of ``folder`` once."""
    text = folder / "text.txt"
    os.environ["HALFSTEP_CACHE"] = str(folder / "cache")
    if not text.exists():
        draw = random.Random(0)  # nothing to learn, as for the bare loop, whose numbers stay alike
        text.write_text("".join(draw.choices(string.printable, k=500_000)), encoding="utf-8")
    options = SHAPE | {
        "data": text, "output-dir": folder / run, "precision": policy, "tokenizer": "bytes",
        "max-steps": steps, "eval-every": steps, "save-every": 0,
        "eval-batches": 1, "learning-rate": RATE, "seed": 0,
    }  # fmt: skip
    return ["train", "--quiet", *(f"--{name}={value}" for name, value in options.items())]


def bare(policy: str, shape: Any) -> Any:
    """A step of the hand-written loop, on a network of the same shape."""
    import torch

    from halfstep.trainer.models.gpt import GPT

    model = GPT(shape, seed=0)
    if policy == "bf16-split":
        model = model.to(torch.bfloat16)
    ps = list(model.parameters())
    groups = [
        {"params": [p for p in ps if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in ps if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    size = (64, SHAPE["batch-size"], SHAPE["block-size"] + 1)
    drawn = torch.randint(shape.vocab_size, size, generator=torch.Generator().manual_seed(0))
    batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in drawn]
    mixed, taken = policy.endswith("-mixed"), 0

    def step() -> float:
        nonlocal taken
        taken += 1
        with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
            total, count = model.loss_sum(batches[taken % len(batches)])
            loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def measure(folder: Path, policy: str, rounds: int) -> dict[str, Any]:
    """The command's steps and the bare loop's in turn, in this process."""
    import halfstep.trainer.run as execute
    from halfstep.cli.main import main

    ours: list[float] = []
    theirs: list[float] = []

    def in_turn(session: Any, path: Path) -> Any:
        step = bare(policy, session.task.model.config)
        ticks, clock = original(session, path), time.perf_counter
        while True:
            begin = clock()
            tick = next(ticks, None)
            between = clock()
            if tick is None:
                return
            step()
            end = clock()
            ours.append(between - begin)
            theirs.append(end - between)
            yield tick

    original, execute.train = execute.train, in_turn
    try:
        code = main(words(folder, f"run-{policy}", policy, WARM_UP + rounds + 1))
    finally:
        execute.train = original
    if code:
        raise SystemExit(f"halfstep train ended with {code}")
    pairs = [*zip(ours, theirs, strict=True)][WARM_UP:-1]  # the last one evaluates and saves
    ratios = [a / b for a, b in pairs]
    low, _, high = quantiles(ratios, n=4)
    # the lost-update meter measures every 50th step: sums over 50 steps hold one measurement each
    spans = [pairs[i : i + 50] for i in range(0, len(pairs) - 49, 50)]
    with_meter = [sum(a for a, _ in span) / sum(b for _, b in span) for span in spans]
    return {
        "ratio": median(ratios), "quartiles": [low, high], "rounds": len(pairs),
        "ratio_with_meter": median(with_meter),
        "trainer_ms": 1e3 * median(a for a, _ in pairs),
        "bare_ms": 1e3 * median(b for _, b in pairs),
    }  # fmt: skip


def start_seconds(folder: Path, number: int) -> float:
    """Seconds from the start of ``halfstep train`` to the first line of its metrics."""
    run = f"start-{number}"
    metrics = folder / run / "metrics.jsonl"
    begin = time.perf_counter()
    command = [sys.executable, "-m", "halfstep", *words(folder, run, "bf16-mixed", 100_000)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as child:
        while child.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.005)
        seconds = time.perf_counter() - begin
        if child.poll() is not None:
            raise SystemExit(f"halfstep train ended with {child.returncode}")
        child.kill()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = {}
        for policy in arguments.policies:
            gc.collect()
            steps[policy] = found = measure(folder, policy, arguments.rounds)
            low, high = found["quartiles"]
            print(
                f"{policy:<12} trainer / bare {found['ratio']:.3f} ({low:.3f} to {high:.3f}), with "
                f"the meter {found['ratio_with_meter']:.3f}, "
                f"{found['trainer_ms']:.2f} ms / {found['bare_ms']:.2f} ms"
            )
        starts = [start_seconds(folder, n) for n in range(arguments.starts + 1)][1:]
        if starts:
            print(f"start to the first step {median(starts):.2f} s, at best {min(starts):.2f} s")
    if not arguments.no_save:
        import torch

        from common import save

        results = {"threads": torch.get_num_threads(), "steps": steps, "start_seconds": starts}
        print(f"written: {save('overhead', results, torch.device('cpu'))}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
