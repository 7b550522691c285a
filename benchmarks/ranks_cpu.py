"""Two ranks on one CPU: our steps beside torch's DDP and FSDP2, and beside one rank, interleaved.

    python benchmarks/ranks_cpu.py [--rounds N] [--seconds S] [--only NAME ...] [--profile]

Two processes with one thread each talk over gloo. Every round takes one step of each variant, in an
order drawn anew, so that a neighbour's load on the machine hits all alike; before each step the
ranks wait for each other. A step takes as long as the slower rank's. "bare" is what people write by
hand: DistributedDataParallel or ``fully_shard`` on the blocks and the root, torch.autocast,
backward, clip_grad_norm_, fused AdamW, zero_grad, over the same model with the same loss. Ours is
the trainer's step: counts of tokens summed over ranks, strategy, Precision, clipping, the check
that all ranks agree on, and the loss on the host. On a CPU without bf16 instructions the bare bf16
loops run inside ``SimulatedProducts``, as ours do; by torch's own products they would take some ten
times as long, which would tell nothing of the loops.

For weak scaling rank 0 also takes the step of one device, with the same batch, while rank 1 sleeps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from common import save, summary
from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import choose_strategy, plan_of
from halfstep.precision.casting.autocast import SimulatedProducts, cpu_has_bf16
from halfstep.precision.step import Precision
from halfstep.trainer.environment import keep_freed_memory
from halfstep.trainer.models.gpt import GPT, GPTConfig
from halfstep.trainer.step import train_step

RANKS = 2
CONFIG = GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=128, vocab_size=8192)
BATCH = (2, 128)
BF16 = torch.bfloat16
CPU = torch.device("cpu")
LEARNING_RATE, WARM_UP, AIM = 1e-4, 4, 1.03

# ours: its bare torch loop; and the one rank that it is to be twice as fast as
RATIOS = {
    "data=2 fp32": "bare DDP fp32",
    "data=2 fp32,reduce=bf16": "bare DDP fp32",
    "shard=2 fp32": "bare FSDP2 fp32",
    "data=2 bf16-mixed": "bare DDP autocast bf16",
    "data=2 bf16-mixed,reduce=bf16": "bare DDP autocast bf16",
    "shard=2 bf16-mixed": "bare FSDP2 autocast bf16",
    "shard=2 bf16-module": "bare FSDP2 param_dtype=bf16",
}
SCALING = {
    "data=2 fp32": "data=1 fp32",
    "data=2 fp32,reduce=bf16": "data=1 fp32",
    "shard=2 fp32": "data=1 fp32",
    "data=2 bf16-mixed": "data=1 bf16-mixed",
    "shard=2 bf16-mixed": "data=1 bf16-mixed",
}


class Loss(torch.nn.Module):
    """DDP and FSDP2 call forward."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The mean loss of a token."""
        total, count = self.model.loss_sum(batch)
        return total / count


@dataclass
class Variant:
    """A step, and what a rank sends in it."""

    step: Callable[[], None]
    sent: int
    sent_fp32: int
    alone: bool = False


def numbers_of(model: GPT) -> tuple[int, int]:
    """Parameters in blocks, and outside."""
    total = sum(p.numel() for p in model.parameters())
    blocks = sum(p.numel() for block in model.blocks() for p in block.parameters())
    return blocks, total - blocks


def bare(
    batch: tuple,
    wrap: Callable[[Loss], torch.nn.Module],
    dtype: torch.dtype | None,
    sent: int,
    low: bool,
) -> Variant:
    """The loop by hand; AdamW is made after the model is wrapped, as FSDP2 needs it."""
    simulated = partial(SimulatedProducts, torch.bfloat16)
    products = simulated if low and not cpu_has_bf16() else contextlib.nullcontext
    model = wrap(Loss(GPT(CONFIG, seed=0)))
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def step() -> None:
        with products():
            with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
                loss = model(batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Variant(step, sent, sent)


def ddp(batch: tuple, dtype: torch.dtype | None, views: bool = False) -> Variant:
    sent = sum(numbers_of(GPT(CONFIG))) * 4  # a ring of two ranks sends the payload once
    return bare(
        batch,
        lambda loss: DistributedDataParallel(loss, gradient_as_bucket_view=views),
        dtype,
        sent,
        low=dtype is not None,
    )


def fsdp(batch: tuple, dtype: torch.dtype | None, gathered: torch.dtype | None = None) -> Variant:
    casts = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)

    def wrap(loss: Loss) -> torch.nn.Module:
        for block in loss.model.blocks():
            fully_shard(block, mp_policy=casts)
        return fully_shard(loss, mp_policy=casts)

    low = (dtype or gathered) is not None
    return bare(batch, wrap, dtype, sharded_bytes(gathered.itemsize if gathered else 4), low)


def sharded_bytes(gathered: int) -> int:
    """What one of two ranks sends: blocks are gathered twice, the rest once, gradients summed."""
    blocks, outside = numbers_of(GPT(CONFIG))
    return ((2 * blocks + outside) * gathered + (blocks + outside) * 4) // RANKS


def ours(batch: tuple, layout: str, policy: str) -> Variant:
    model = GPT(CONFIG, seed=0)
    strategy = choose_strategy(Layout.parse(layout), policy, CPU)
    strategy.place_(model, plan_of(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    precision = Precision(policy, model, optimizer, ranks=strategy.ranks)
    strategy.attach_(precision)

    def step() -> None:
        train_step(
            model.loss_sum, precision, strategy, [batch],
            learning_rate=lambda peak: peak, max_norm=1.0,
        )  # fmt: skip

    numbers = 0 if layout == "data=1" else sum(numbers_of(GPT(CONFIG)))  # each is sent once
    sent = numbers * strategy.policy.reduce_dtype.itemsize, numbers * 4
    if layout.startswith("shard"):
        sent = sharded_bytes(2 if policy == "bf16-module" else 4), sharded_bytes(4)
    return Variant(step, *sent, alone=layout == "data=1")


def random_batch(rank: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(CONFIG.vocab_size, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_variants(rank: int, only: list[str]) -> dict[str, Variant]:
    """All variants, or those whose names are given; both ranks make them in the same order."""
    batch = random_batch(rank, *BATCH)
    makers = {
        "bare DDP fp32": partial(ddp, batch, None),
        "bare DDP fp32, gradients as views": partial(ddp, batch, None, views=True),
        "bare FSDP2 fp32": partial(fsdp, batch, None),
        "bare DDP autocast bf16": partial(ddp, batch, BF16),
        "bare FSDP2 autocast bf16": partial(fsdp, batch, BF16),
        "bare FSDP2 param_dtype=bf16": partial(fsdp, batch, None, BF16),
    }
    for name in [*RATIOS, *dict.fromkeys(SCALING.values())]:
        layout, _, policy = name.partition(" ")
        makers[name] = partial(ours, batch, layout, policy)
    return {name: make() for name, make in makers.items() if not only or name in only}


def timed(variant: Variant, rank: int) -> tuple[float, float]:
    """Seconds of one step, of the clock on the slower rank and of the processor on both."""
    dist.barrier()
    begin, busy = time.perf_counter(), time.process_time()
    if not variant.alone or rank == 0:
        variant.step()
    seconds = 0.0 if variant.alone and rank else time.perf_counter() - begin
    table = torch.zeros(RANKS, 2, dtype=torch.float64)
    table[rank] = torch.tensor([seconds, time.process_time() - busy])
    dist.all_reduce(table)
    return table[:, 0].max().item(), table[:, 1].sum().item()


def worker(rank: int, folder: str, arguments: argparse.Namespace, pipe) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    variants = make_variants(rank, arguments.only)
    times: dict[str, list[float]] = {name: [] for name in variants}
    busy: dict[str, list[float]] = {name: [] for name in variants}
    spent = 0.0
    for number in range(-WARM_UP, arguments.rounds):  # DDP builds its buckets anew after the first
        if spent > arguments.seconds and number > 0:
            break
        for name in random.Random(number).sample(sorted(variants), len(variants)):
            seconds, processor = timed(variants[name], rank)
            spent += seconds
            if number >= 0:
                times[name].append(seconds)
                busy[name].append(processor)
    if arguments.profile:
        for name in [n for n in variants if n.endswith("fp32")]:
            with torch.profiler.profile() as found:
                for _ in range(3):
                    timed(variants[name], rank)
            if rank == 0:
                print(name, found.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
    if rank == 0:
        sent = {n: (v.sent, v.sent_fp32) for n, v in variants.items()}
        pipe.send((times, busy, sent, sum(numbers_of(GPT(CONFIG)))))
    dist.barrier()
    os._exit(0)  # the interpreter's own end may abort after gloo's threads


def start(arguments: argparse.Namespace) -> tuple[dict, dict, dict, int]:
    """Run the ranks; by variant times, processor times and bytes; and the number of parameters."""
    context = mp.get_context("spawn")
    end, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=worker, args=(rank, folder, arguments, theirs))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        theirs.close()
        found = end.recv()  # EOFError if both ranks are gone
        for process in ranks:
            process.join()
    return found


def compare(times: dict[str, list[float]], rates: dict) -> tuple[dict, dict]:
    """Step-time ratios to the bare loops, and tokens per second beside one rank."""
    ratios = {
        f"{name} / {other}": {
            "median": rates[name]["median_seconds"] / rates[other]["median_seconds"],
            "fastest": rates[name]["min_seconds"] / rates[other]["min_seconds"],
            "round_by_round": median(a / b for a, b in zip(times[name], times[other], strict=True)),
            "processor": rates[name]["median_processor_seconds"]
            / rates[other]["median_processor_seconds"],
            "aim": AIM,
        }
        for name, other in RATIOS.items()
        if name in times and other in times
    }
    scaling = {}
    for name, other in SCALING.items():
        if name not in times or other not in times:
            continue
        tokens = BATCH[0] * BATCH[1]
        one, two = rates[other], rates[name]
        scaling[name] = {
            "tokens_per_second_1_rank": tokens / one["median_seconds"],
            "tokens_per_second_2_ranks": RANKS * tokens / two["median_seconds"],
            "efficiency": one["median_seconds"] / two["median_seconds"],
            "efficiency_fastest": one["min_seconds"] / two["min_seconds"],
        }
    return ratios, scaling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=200, help="take no new round after these")
    parser.add_argument("--only", nargs="+", default=[], help="names of variants; saves nothing")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print operators of fp32 variants")
    arguments = parser.parse_args()
    times, busy, sent, parameters = start(arguments)
    rounds = max(map(len, times.values()))
    rates = {name: summary(seconds) for name, seconds in times.items()}
    for name, (bytes_, wide) in sent.items():
        rates[name] |= {
            "median_processor_seconds": median(busy[name]),
            "bytes_per_step": bytes_,
            "fp32_bytes_per_step": wide,
        }
    print(f"{parameters:,} parameters, {RANKS} ranks, {rounds} rounds, batches {BATCH} a rank")
    print(f"\n{'variant':<36} {'median ms':>10} {'fastest':>8} {'CPU ms':>8} {'MB sent':>8}")
    for name, row in rates.items():
        print(f"{name:<36} {row['median_seconds'] * 1e3:>10.1f} {row['min_seconds'] * 1e3:>8.1f} "
              f"{row['median_processor_seconds'] * 1e3:>8.1f} "
              f"{row['bytes_per_step'] / 1e6:>8.1f}")  # fmt: skip
    ratios, scaling = compare(times, rates)
    print(f"\n{'ratio of step times':<60} {'median':>7} {'fastest':>8} {'paired':>7} "
          f"{'CPU':>6} {'aim':>5}")  # fmt: skip
    for name, row in ratios.items():
        verdict = "reached" if row["median"] <= row["aim"] else "MISSED"
        print(f"{name:<60} {row['median']:>7.3f} {row['fastest']:>8.3f} "
              f"{row['round_by_round']:>7.3f} {row['processor']:>6.3f} "
              f"{row['aim']:>5.2f} {verdict}")  # fmt: skip
    print(f"\n{'tokens per second':<32} {'1 rank':>8} {'2 ranks':>8} {'efficiency':>11} "
          f"{'fastest':>8}")  # fmt: skip
    for name, row in scaling.items():
        print(f"{name:<32} {row['tokens_per_second_1_rank']:>8.0f} "
              f"{row['tokens_per_second_2_ranks']:>8.0f} {row['efficiency']:>11.2f} "
              f"{row['efficiency_fastest']:>8.2f}")  # fmt: skip
    if not arguments.no_save and not arguments.only:
        results = {
            "parameters": parameters,
            "ranks": RANKS,
            "threads_per_rank": 1,
            "rounds": rounds,
            "load_average_at_end": Path("/proc/loadavg").read_text().split()[:3],
            "batch_per_rank": BATCH,
            "steps": rates,
            "ratios": ratios,
            "weak_scaling": scaling,
        }
        print(f"\nwritten: {save('ranks-cpu', results, CPU)}")


if __name__ == "__main__":
    main()
