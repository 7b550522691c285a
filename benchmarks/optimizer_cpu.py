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
from halfstep.optim.dispatch import kernel_name
from halfstep.optim.optimizers import AdamW
from halfstep.precision.gradients import clip_factor, global_norm

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
        norm = float(global_norm([p.grad for p in owned]))
        assert math.isfinite(norm)
        optimizer.step(multiplier=clip_factor(norm, 1e9))

    return tail


def variants() -> dict[str, tuple]:
    low, full = torch.bfloat16, torch.float32
    return {
        "torch default fp32": (torch_step(full), 16),
        "torch foreach fp32": (torch_step(full, foreach=True), 16),
        "torch fused fp32": (torch_step(full, fused=True), 16),
        "torch fused bf16, no master": (torch_step(low, fused=True), 8),
        "halfstep fp32": (our_step(full), 16),
        "halfstep split, fp32 moments": (our_step(low, update="split"), 14),
        "halfstep split, bf16 moments": (our_step(low, update="split", moments="bf16"), 10),
        "halfstep split, 8-bit moments": (our_step(low, update="split", moments="8bit"), 8.016),
        "halfstep split24, 8-bit moments": (our_step(low, update="split24", moments="8bit"), 7.016),
        "halfstep kahan, bf16 moments": (our_step(low, update="kahan", moments="bf16"), 10),
        "halfstep stochastic, 8-bit": (our_step(low, update="stochastic", moments="8bit"), 6.016),
        "tail: torch fused fp32": (torch_tail(full, fused=True), 16),
        "tail: halfstep split, fp32 moments": (our_tail(low, update="split"), 14),
        "tail: halfstep split, 8-bit moments": (
            our_tail(low, update="split", moments="8bit"),
            8.016,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    made = variants()
    times: dict[str, list[float]] = {name: [] for name in made}
    for step, _ in made.values():
        step()
    for _ in range(arguments.rounds):
        for name, (step, _) in made.items():
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    rates = {name: {**summary(seconds), "bytes_per_parameter": made[name][1]}
             for name, seconds in times.items()}  # fmt: skip
    print(f"kernel: {kernel_name(torch.device('cpu'))}, {torch.get_num_threads()} threads")
    print(f"\n{'variant':<38} {'ms':>7} {'best':>7} {'B/param':>8}")
    for name, row in rates.items():
        print(f"{name:<38} {row['median_seconds'] * 1e3:>7.1f} {row['min_seconds'] * 1e3:>7.1f} "
              f"{row['bytes_per_parameter']:>8.4g}")  # fmt: skip

    def ratio(slow: str, fast: str) -> float:
        return rates[slow]["median_seconds"] / rates[fast]["median_seconds"]

    exact = "halfstep split, fp32 moments"
    ratios = {
        "torch default / split, fp32 moments": (ratio("torch default fp32", exact), 5.0),
        "torch fused / split, fp32 moments": (ratio("torch fused fp32", exact), 1.0),
        "torch default / split, 8-bit moments": (
            ratio("torch default fp32", "halfstep split, 8-bit moments"), 5.0),
        "torch fused / split, 8-bit moments": (
            ratio("torch fused fp32", "halfstep split, 8-bit moments"), 1.0),
        "tail: torch fused / split, fp32 moments": (
            ratio("tail: torch fused fp32", "tail: " + exact), 1.0),
    }  # fmt: skip
    print(f"\n{'ratio of medians':<42} {'got':>6} {'aim':>6}")
    for name, (got, aim) in ratios.items():
        print(f"{name:<42} {got:>6.2f} {aim:>6.2f} {'reached' if got >= aim else 'MISSED'}")
    if not arguments.no_save:
        results = {
            "parameters": sum(math.prod(shape) for shape in SHAPES),
            "kernel": kernel_name(torch.device("cpu")),
            "steps": rates,
            "ratios": {name: {"got": got, "aim": aim} for name, (got, aim) in ratios.items()},
        }
        print(f"\nwritten: {save('optimizer-cpu', results, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
