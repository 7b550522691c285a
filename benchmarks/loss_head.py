"""The loss head, forward and backward: ours beside plain torch and torch's own chunked one.

    python benchmarks/loss_head.py [--rounds N]

2048 tokens, 384 wide, vocabulary 8192. The exact loss is computed in fp64, since speed is worth
nothing beside a loss that has lost digits.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
import torch.nn.functional as F

from common import save, summary
from halfstep import linear_cross_entropy
from halfstep.trainer.environment import keep_freed_memory

N, D, V = 2048, 384, 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--default-malloc", action="store_true")
    arguments = parser.parse_args()
    tuned = not arguments.default_malloc
    if tuned:
        keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator)
    w = torch.randn(V, D, generator=generator) * 0.02
    targets = torch.randint(V, (N,), generator=generator)
    exact = float(F.cross_entropy(x.double() @ w.double().t(), targets, reduction="sum"))
    x.requires_grad_()
    w.requires_grad_()

    def plain() -> torch.Tensor:
        return F.cross_entropy(F.linear(x, w).float(), targets, reduction="sum")

    def ours() -> torch.Tensor:
        return linear_cross_entropy(x, w, targets, reduction="sum")

    variants = {}
    for name, dtype in (("fp32", None), ("bf16 autocast", torch.bfloat16)):
        variants[f"plain {name}"] = (plain, dtype)
        variants[f"halfstep {name}"] = (ours, dtype)
        if hasattr(F, "linear_cross_entropy"):  # torch 2.13
            options = torch.nn.LinearCrossEntropyOptions()

            def theirs(options=options) -> torch.Tensor:
                return F.linear_cross_entropy(x, w, targets, reduction="sum", options=options)

            variants[f"torch chunked {name}"] = (theirs, dtype)
    times: dict[str, list[float]] = {name: [] for name in variants}
    losses = {}
    for _ in range(arguments.rounds + 1):
        for name, (loss_of, dtype) in variants.items():
            x.grad = w.grad = None
            begin = time.perf_counter()
            with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                loss = loss_of()
            loss.backward()
            times[name].append(time.perf_counter() - begin)
            losses[name] = float(loss.detach())
    print(f"{'variant':<28} {'median ms':>9} {'min ms':>8} {'relative error of the loss':>27}")
    rows = {}
    for name, seconds in times.items():
        row = summary(seconds[1:])
        row["loss_relative_error"] = abs(losses[name] / exact - 1)
        rows[name] = row
        print(
            f"{name:<28} {row['median_seconds'] * 1e3:>9.1f} {row['min_seconds'] * 1e3:>8.1f} "
            f"{row['loss_relative_error']:>27.1e}"
        )
    results = {"shape": [N, D, V], "freed_memory_kept": tuned, "variants": rows}
    print(f"written: {save('loss-head', results, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
