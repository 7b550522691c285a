"""GPT-2 on one GPU: tokens per second and model FLOPs utilisation, beside bare torch.

    python benchmarks/train_cuda.py [--config gpt2] [--rows 32] [--compile]

One variant after the other, median of its steps. MFU counts (6 N + 12 L C T) FLOPs per token
against the dense bf16 peak of the data sheet; the rate of a large bf16 product, measured here,
stands beside it. What it found, where it was run at all, is in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable

import torch

from common import save, summary
from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import Strategy
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.environment import gemm_flops_per_second
from halfstep.trainer.models.gpt.gpt import GPT
from halfstep.trainer.optimizer import make_optimizer
from halfstep.trainer.step import train_step

# Dense bf16 tensor-core FLOP/s. Source: NVIDIA data sheets of the SXM parts, without sparsity.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
VOCABULARY = 50304  # 50257 rounded up to a multiple of 64, as GPT-2 training codes do


def measured(make: Callable[[], Callable[[], None]], rounds: int, tokens: int) -> dict[str, float]:
    """A variant's steps, timed with the device waited for, and the most memory that they took."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = make()
    for _ in range(3):
        step()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {
        **summary(times),
        "tokens_per_second": tokens / summary(times)["median_seconds"],
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="gpt2")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--policies", nargs="+", default=[
        "fp32", "tf32", "fp16-mixed", "bf16-mixed", "bf16-split", "bf16-split,moments=8bit"
    ])  # fmt: skip
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("train_cuda: torch sees no CUDA device")
    device = torch.device("cuda", 0)
    config = load_config(arguments.config, [("model.vocab_size", VOCABULARY)])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (arguments.rows, config.block_size + 1), generator=generator)
    batches = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]

    def build(policy: str = "fp32"):
        model = GPT(config.model, seed=0).to(device)
        loss_sum = torch.compile(model.loss_sum) if arguments.compile else model.loss_sum
        return model, loss_sum, make_optimizer(model, config.optimizer, parse_policy(policy))

    def ours(policy: str):
        model, loss_sum, optimizer = build(policy)
        precision = Precision(policy, model, optimizer)
        alone = Strategy(Layout(), precision.policy, device)

        def step() -> None:
            train_step(
                loss_sum, precision, alone, batches, learning_rate=lambda _: 1e-4, max_norm=1.0
            )

        return step

    def bare(dtype: torch.dtype | None):
        model, loss_sum, optimizer = build()
        on_device = tuple(part.to(device) for part in batches[0])
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)

        def step() -> None:
            with torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext():
                total, count = loss_sum(on_device)
                loss = total / count
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

        return step

    rows = {}
    for name, make in {
        **{policy: (lambda p=policy: ours(p)) for policy in arguments.policies},
        "bare fp32": lambda: bare(None),
        "bare autocast fp16, GradScaler": lambda: bare(torch.float16),
        "bare autocast bf16": lambda: bare(torch.bfloat16),
    }.items():
        torch.compiler.reset()  # the variants are more than the recompilations that torch allows
        rows[name] = measured(make, arguments.rounds, tokens[:, 1:].numel())

    title = "train-cuda" + "-compiled" * arguments.compile
    results = {"config": arguments.config, "rows": arguments.rows, "compile": arguments.compile,
               "variants": rows, **told(rows, config, device)}  # fmt: skip
    print(f"written: {save(title, results, device)}")


def told(rows: dict[str, dict], config: TrainConfig, device: torch.device) -> dict[str, float]:
    """Prints the table, adds each variant's MFU to it, and returns what that was counted by."""
    name = torch.cuda.get_device_name(device)
    peak = next((value for key, value in PEAKS.items() if key in name), None)
    with torch.device("meta"):
        flops = GPT(config.model, seed=0).flops_per_token(config.block_size)
    gemm = gemm_flops_per_second(POLICIES["bf16-mixed"], device, size=8192)
    print(f"{name}: bf16 product {gemm / 1e12:.0f} TFLOP/s; {flops / 1e6:.0f} MFLOP per token")
    print(f"{'variant':<32} {'tokens/s':>10} {'MFU':>6} {'of GEMM':>8} {'peak GB':>8}")
    for variant, row in rows.items():
        rate = row["tokens_per_second"] * flops
        row["mfu"] = rate / peak if peak else None
        row["gemm_share"] = rate / gemm
        mfu = f"{row['mfu']:.1%}" if peak else "-"
        print(
            f"{variant:<32} {row['tokens_per_second']:>10,.0f} {mfu:>6} {row['gemm_share']:>8.1%} "
            f"{row['peak_memory_bytes'] / 1e9:>8.1f}"
        )
    return {"flops_per_token": flops, "bf16_gemm": gemm}


if __name__ == "__main__":
    main()
