"""Tokens per second of every policy beside bare torch loops, in one process, interleaved.

    python benchmarks/train_cpu.py [--rounds N] [--default-malloc] [--only NAME ...]

The model is gpt-small-cpu (6 layers, 384 wide) with a vocabulary of 8192, batch 8 x 256, on random
tokens: speed does not depend on what they are. Each round takes one step of every variant in turn,
so that a neighbour's load on the machine hits all alike. A ratio is that of the medians of the
steps; the minima stand beside them. "bare" is what people write by hand: torch.autocast, backward,
clip_grad_norm_, fused AdamW, zero_grad, and the same model with the same loss.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch

from common import save, summary
from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import Strategy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision
from halfstep.trainer.config.config import load_config
from halfstep.trainer.environment import keep_freed_memory
from halfstep.trainer.models.gpt import GPT
from halfstep.trainer.step import make_optimizer, train_step

VOCABULARY = 8192
SHAPES = {"gpt-small-cpu": (8, 256), "gpt-tiny": (16, 128)}


def batch(shape: tuple[int, int], vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (shape[0], shape[1] + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make(config_name: str, vocabulary: int, policy: str = "fp32"):
    eps = 1e-4 if policy == "fp16-pure" else 1e-8  # 1e-8 is 0 in fp16
    overrides = [("model.vocab_size", vocabulary), ("optimizer.eps", eps)]
    config = load_config(config_name, overrides)
    model = GPT(config.model, seed=0)
    return model, make_optimizer(model, config.optimizer, parse_policy(policy))


def ours(config_name: str, policy: str, vocabulary: int = VOCABULARY):
    """A step of this library: count, forward, backward, check, clip, update, report."""
    model, optimizer = make(config_name, vocabulary, policy)
    precision = Precision(policy, model, optimizer)
    alone = Strategy(Layout(), precision.policy, torch.device("cpu"))
    batches = [batch(SHAPES[config_name], vocabulary)]

    def step() -> int:
        train_step(
            model.loss_sum, precision, alone, batches, learning_rate=lambda _: 1e-3, max_norm=1.0
        )
        return batches[0][0].numel()

    return step


def bare(config_name: str, dtype: torch.dtype | None, vocabulary: int = VOCABULARY, rows: int = 0,
         cast: bool = False):  # fmt: skip
    """A hand-written loop over the same model."""
    model, optimizer = make(config_name, vocabulary)
    if cast:
        model = model.to(dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    tokens, targets = batch(SHAPES[config_name], vocabulary)
    tokens, targets = (part[: rows or None] for part in (tokens, targets))
    on = dtype is not None and not cast

    def step() -> int:
        with torch.autocast("cpu", dtype=dtype) if on else contextlib.nullcontext():
            total, count = model.loss_sum((tokens, targets))
            loss = total / count
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return tokens.numel()

    return step


def run(variants: dict, rounds: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    tokens = {name: step() for name, step in variants.items()}  # a first step, not counted
    for _ in range(rounds):
        for name, step in variants.items():
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    return {
        name: {
            **summary(seconds),
            "tokens_per_second": tokens[name] / summary(seconds)["median_seconds"],
            "best_tokens_per_second": tokens[name] / min(seconds),
        }
        for name, seconds in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tiny-rounds", type=int, default=60)
    parser.add_argument("--default-malloc", action="store_true", help="leave the allocator alone")
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    tuned = not arguments.default_malloc
    if tuned:
        keep_freed_memory()

    small = "gpt-small-cpu"
    policies = ("fp32", "bf16-mixed", "bf16-master", "bf16-split", "bf16-split,moments=bf16",
                "bf16-split,moments=8bit", "bf16-sr", "fp16-mixed", "fp16-master", "bf16-pure",
                "fp16-pure")  # fmt: skip
    rates = run(
        {policy: ours(small, policy) for policy in policies}
        | {
            "bare fp32": bare(small, None),
            "bare autocast bf16": bare(small, torch.bfloat16),
            "bare all-bf16": bare(small, torch.bfloat16, cast=True),
        },
        arguments.rounds,
    )
    # One sequence instead of eight: torch's fp16 on a CPU takes half a minute for eight.
    rates |= run({"bare autocast fp16": bare(small, torch.float16, rows=1)}, 2)
    tiny = run(
        {
            "bf16-mixed": ours("gpt-tiny", "bf16-mixed", 1024),
            "bare autocast bf16": bare("gpt-tiny", torch.bfloat16, 1024),
            "fp32": ours("gpt-tiny", "fp32", 1024),
            "bare fp32": bare("gpt-tiny", None, 1024),
        },
        arguments.tiny_rounds,
    )

    def ratio(a: str, b: str, table: dict = rates) -> float:
        return table[a]["tokens_per_second"] / table[b]["tokens_per_second"]

    ratios = {
        "bf16-mixed / fp32": (ratio("bf16-mixed", "fp32"), 2.2),
        "bf16-mixed / bare autocast bf16": (ratio("bf16-mixed", "bare autocast bf16"), 0.98),
        "bf16-split / bf16-mixed": (ratio("bf16-split", "bf16-mixed"), 1.05),
        "bf16-split,moments=8bit / bf16-mixed": (
            ratio("bf16-split,moments=8bit", "bf16-mixed"),
            1.05,
        ),
        "bf16-master / bf16-mixed": (ratio("bf16-master", "bf16-mixed"), 1.1),
        "fp16-mixed / bare autocast fp16": (ratio("fp16-mixed", "bare autocast fp16"), 10.0),
        "fp16-mixed / fp32": (ratio("fp16-mixed", "fp32"), 0.5),
        "gpt-tiny bf16-mixed / bare": (ratio("bf16-mixed", "bare autocast bf16", tiny), 1 / 1.03),
        "gpt-tiny fp32 / bare": (ratio("fp32", "bare fp32", tiny), 1 / 1.03),
    }
    for title, table in (("gpt-small-cpu, 8 x 256", rates), ("gpt-tiny, 16 x 128", tiny)):
        print(f"\n{title:<26} {'tokens/s':>9} {'best':>9}  median of")
        for name, row in table.items():
            print(
                f"{name:<26} {row['tokens_per_second']:>9,.0f} "
                f"{row['best_tokens_per_second']:>9,.0f}  {row['samples']:.0f}"
            )
    print(f"\n{'ratio of medians':<38} {'got':>6} {'aim':>6}")
    for name, (got, aim) in ratios.items():
        print(f"{name:<38} {got:>6.2f} {aim:>6.2f} {'reached' if got >= aim else 'MISSED'}")
    if not arguments.no_save:
        results = {
            "freed_memory_kept": tuned,
            "gpt-small-cpu": rates,
            "gpt-tiny": tiny,
            "ratios": {name: {"got": got, "aim": aim} for name, (got, aim) in ratios.items()},
        }
        name = "train-cpu" if tuned else "train-cpu-default-malloc"
        print(f"\nwritten: {save(name, results, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
