"""One optimizer step on a CPU over GPT-2 124M's shapes, beside torch's AdamW, interleaved.

    python benchmarks/optimizer_cpu.py [--rounds N] [--no-save]

"step" is ``optimizer.step()`` alone. "tail" is all between backward and the next forward: for torch
unscale_, clip_grad_norm_, step and update with GradScaler; for halfstep the norm with its check of
finiteness, and a step that unscales and clips on the fly. Every variant owns its weights, gradients
and state, so that nothing is warm in a cache that would not be in training.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import nn

from common import save, summary
from halfstep.optim.kernels.cpu import native_kernel
from halfstep.optim.optimizers import AdamW
from halfstep.precision.scaling.gradients import clip_factor

WIDTH, LAYERS, VOCABULARY, POSITIONS = 768, 12, 50257, 1024
BLOCK = [(WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH,),
         (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)]  # fmt: skip
SHAPES = [(VOCABULARY, WIDTH), (POSITIONS, WIDTH), *BLOCK * LAYERS, (WIDTH,), (WIDTH,)]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in SHAPES:
        made.append(nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype)))
        made[-1].grad = (torch.randn(shape, generator=generator) * 1e-3).to(dtype)
    return made


def torch_step(dtype: torch.dtype, **options):
    owned = parameters(dtype)
    return torch.optim.AdamW(owned, **options).step


def torch_tail(dtype: torch.dtype, **options):
    owned = parameters(dtype)
    optimizer = torch.optim.AdamW(owned, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))

    def tail() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(owned, 1e9)
        scaler.step(optimizer)
        scaler.update()

    return tail


def our_step(dtype: torch.dtype, **options):
    return AdamW(parameters(dtype), **options).step


def our_tail(dtype: torch.dtype, **options):
    owned = parameters(dtype)
    optimizer = AdamW(owned, **options)

    def tail() -> None:
        norm = float(optimizer.norm([p.grad for p in owned]))
        assert math.isfinite(norm)
        optimizer.step(multiplier=clip_factor(norm, 1e9))

    return tail


LOW, FULL = torch.bfloat16, torch.float32
EXACT = "halfstep split, fp32 moments"
# Name to (what makes it, bytes per parameter). The variants of one group are interleaved.
GROUPS = [
    {
        "torch default fp32": (lambda: torch_step(FULL), 16),
        "torch fused fp32": (lambda: torch_step(FULL, fused=True), 16),
        EXACT: (lambda: our_step(LOW, update="split"), 14),
        "halfstep split, bf16 moments": (
            lambda: our_step(LOW, update="split", moments="bf16"), 10),
        "halfstep split, 8-bit moments": (
            lambda: our_step(LOW, update="split", moments="8bit"), 8.016),
    },
    {
        "torch foreach fp32": (lambda: torch_step(FULL, foreach=True), 16),
        "torch fused bf16, no master": (lambda: torch_step(LOW, fused=True), 8),
        "halfstep fp32": (lambda: our_step(FULL), 16),
        "halfstep split24, 8-bit moments": (
            lambda: our_step(LOW, update="split24", moments="8bit"), 7.016),
        "halfstep kahan, bf16 moments": (
            lambda: our_step(LOW, update="kahan", moments="bf16"), 10),
        "halfstep stochastic, 8-bit": (
            lambda: our_step(LOW, update="stochastic", moments="8bit"), 6.016),
    },
    {
        "tail: torch fused fp32": (lambda: torch_tail(FULL, fused=True), 16),
        "tail: " + EXACT: (lambda: our_tail(LOW, update="split"), 14),
        "tail: halfstep split, 8-bit moments": (
            lambda: our_tail(LOW, update="split", moments="8bit"), 8.016),
    },
]  # fmt: skip


def measure(group: dict[str, tuple], rounds: int) -> dict[str, dict[str, float]]:
    steps = {name: make() for name, (make, _) in group.items()}
    times: dict[str, list[float]] = {name: [] for name in group}
    for _ in range(2):  # state is made, pages are touched
        for step in steps.values():
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    return {
        name: {**summary(seconds), "bytes_per_parameter": group[name][1]}
        for name, seconds in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    rates: dict[str, dict[str, float]] = {}
    for group in GROUPS:
        rates |= measure(group, arguments.rounds)
    kernel = native_kernel() if isinstance(native_kernel(), str) else "compiled for this CPU"
    print(f"kernel: {kernel}, {torch.get_num_threads()} threads")
    print(f"\n{'variant':<38} {'ms':>7} {'best':>7} {'B/param':>8}")
    for name, row in rates.items():
        print(f"{name:<38} {row['median_seconds'] * 1e3:>7.1f} {row['min_seconds'] * 1e3:>7.1f} "
              f"{row['bytes_per_parameter']:>8.4g}")  # fmt: skip

    def ratio(slow: str, fast: str) -> float:
        return rates[slow]["median_seconds"] / rates[fast]["median_seconds"]

    eight = "halfstep split, 8-bit moments"
    ratios = {
        f"{slow} / {fast}": (ratio(slow, fast), aim)
        for slow, fast, aim in (
            ("torch default fp32", EXACT, 5.0),
            ("torch fused fp32", EXACT, 1.0),
            ("torch default fp32", eight, 5.0),
            ("torch fused fp32", eight, 1.0),
            ("tail: torch fused fp32", "tail: " + EXACT, 1.0),
            ("tail: torch fused fp32", "tail: " + eight, 1.0),
        )
    }
    print(f"\n{'ratio of medians':<60} {'got':>6} {'aim':>6}")
    for name, (got, aim) in ratios.items():
        print(f"{name:<60} {got:>6.2f} {aim:>6.2f} {'reached' if got >= aim else 'MISSED'}")
    if not arguments.no_save:
        results = {
            "parameters": sum(math.prod(shape) for shape in SHAPES),
            "kernel": kernel,
            "steps": rates,
            "ratios": {name: {"got": got, "aim": aim} for name, (got, aim) in ratios.items()},
        }
        print(f"\nwritten: {save('optimizer-cpu', results, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
