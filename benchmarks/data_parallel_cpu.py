"""Two ranks on one CPU: a step with our gradient sums beside torch's DDP, in one run, interleaved.

    python benchmarks/data_parallel_cpu.py [--rounds N] [--no-save] [--profile]

Two processes with one thread each talk over gloo. Every round takes one step of each variant in
turn, so that a neighbour's load on the machine hits all alike; before each step the ranks wait for
each other. A step takes as long as the slower rank's. "bare" is what people write by hand: torch's
DistributedDataParallel, torch.autocast, backward, clip_grad_norm_, fused AdamW, zero_grad, over the
same model with the same loss. Ours is Precision with a GradientReducer and the same optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from common import save, summary
from halfstep.distributed.data_parallel import GradientReducer
from halfstep.models.gpt import GPT, GPTConfig
from halfstep.precision.step import Precision
from halfstep.training.allocator import keep_freed_memory

RANKS = 2
CONFIG = GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=128, vocab_size=8192)
# A CPU without bf16 instructions takes 10 times as long for bf16 products: fewer tokens there.
BATCHES = {"fp32": (2, 128), "bf16": (1, 32)}
FP32, BF16 = torch.float32, torch.bfloat16


class Loss(torch.nn.Module):
    """DDP calls forward and nothing else."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The mean loss of a token."""
        total, count = self.model.loss_sum(batch)
        return total / count


def make() -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(CONFIG, seed=0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def bare(batch: tuple, dtype: torch.dtype | None, views: bool = False):
    model, optimizer = make()
    parallel = DistributedDataParallel(Loss(model), gradient_as_bucket_view=views)

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
            loss = parallel(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, None


def ours(batch: tuple, policy: str, reduce_dtype: torch.dtype):
    model, optimizer = make()
    precision = Precision(policy, model, optimizer)
    reducer = GradientReducer(precision, dist.group.WORLD, reduce_dtype)

    def step() -> None:
        with precision.autocast():
            total, count = model.loss_sum(batch)
            loss = total / (count * RANKS)
        with reducer.last():
            precision.backward(loss)
        reducer.finish()
        precision.step(max_norm=1.0)

    return step, reducer


def random_batch(rank: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(CONFIG.vocab_size, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def worker(rank: int, folder: str, rounds: int, profile: bool, pipe) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    fp32, bf16 = (random_batch(rank, *BATCHES[name]) for name in ("fp32", "bf16"))
    variants = {
        "bare DDP fp32": bare(fp32, None),
        "bare DDP fp32, gradients as views": bare(fp32, None, views=True),
        "fp32, reduce fp32": ours(fp32, "fp32", FP32),
        "fp32, reduce bf16": ours(fp32, "fp32", BF16),
        "bare DDP autocast bf16": bare(bf16, BF16),
        "bf16-mixed, reduce fp32": ours(bf16, "bf16-mixed", FP32),
        "bf16-mixed, reduce bf16": ours(bf16, "bf16-mixed", BF16),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 2):  # DDP builds its buckets anew after the first
        for name, (step, _) in variants.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if number >= 2:
                times[name].append(float(seconds))
    if profile:
        for name in ("bare DDP fp32", "fp32, reduce fp32", "fp32, reduce bf16"):
            with torch.profiler.profile() as found:
                for _ in range(3):
                    variants[name][0]()
            if rank == 0:
                print(name, found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
    if rank == 0:
        sent = {n: r.bytes_per_step for n, (_, r) in variants.items() if r is not None}
        wide = {n: r.fp32_bytes_per_step for n, (_, r) in variants.items() if r is not None}
        pipe.send((times, sent, wide, sum(p.numel() for p in make()[0].parameters())))
    dist.barrier()
    os._exit(0)  # the interpreter's own end may abort after gloo's threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    context = mp.get_context("spawn")
    ours_end, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=worker, args=(r, folder, arguments.rounds, arguments.profile, theirs)
            )
            for r in range(RANKS)
        ]
        for process in ranks:
            process.start()
        times, sent, wide, parameters = ours_end.recv()
        for process in ranks:
            process.join()
    rates = {name: summary(seconds) for name, seconds in times.items()}
    for name, bytes_ in sent.items():
        rates[name] |= {"bytes_per_step": bytes_, "fp32_bytes_per_step": wide[name]}
    print(f"{parameters:,} parameters, {RANKS} ranks, batches {BATCHES}")
    print(f"\n{'variant':<36} {'ms':>7} {'best':>7} {'MB sent':>8}")
    for name, row in rates.items():
        megabytes = f"{row['bytes_per_step'] / 1e6:>8.1f}" if name in sent else ""
        print(f"{name:<36} {row['median_seconds'] * 1e3:>7.1f} {row['min_seconds'] * 1e3:>7.1f} "
              f"{megabytes}")  # fmt: skip

    ratios = {}
    for name in sent:
        other = "bare DDP fp32" if name.startswith("fp32") else "bare DDP autocast bf16"
        ratios[f"{name} / {other}"] = {
            "median": rates[name]["median_seconds"] / rates[other]["median_seconds"],
            "fastest": rates[name]["min_seconds"] / rates[other]["min_seconds"],
            "aim": 1.03,
        }
    print(f"\n{'ratio of step times':<60} {'median':>7} {'fastest':>8} {'aim':>5}")
    for name, row in ratios.items():
        verdict = "reached" if row["median"] <= row["aim"] else "MISSED"
        print(
            f"{name:<60} {row['median']:>7.3f} {row['fastest']:>8.3f} {row['aim']:>5.2f} {verdict}"
        )
    if not arguments.no_save:
        results = {
            "parameters": parameters,
            "ranks": RANKS,
            "threads_per_rank": 1,
            "batches": BATCHES,
            "steps": rates,
            "ratios": ratios,
        }
        print(f"\nwritten: {save('data-parallel-cpu', results, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
