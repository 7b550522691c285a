"""Muon with an exact split master and 8-bit momentum beside torch's in fp32: time, loss, bytes.

    python benchmarks/muon_cpu.py [--parts times losses] [--rounds N] [--steps N]
                                  [--seeds N ...] [--no-save]

The model is gpt-small-cpu (14 M parameters) with a vocabulary of 8192. Times: a step of the
optimizers alone over the model's parameters, interleaved in one process; torch's is
torch.optim.Muon for the matrices and fused torch.optim.AdamW for the rest, both in fp32. Losses:
the mean of the last 20 of ``--steps`` steps on the bytes of the standard library's source, each
seed with its own weights and batches, under bf16-mixed for torch's and bf16-split for ours; and
the bytes of the storages that the matrices' weights and state occupy. Each part writes a file of
results.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common import save, summary
from halfstep.optim import Muon, muon_groups
from halfstep.precision.step import Precision
from halfstep.trainer.config.config import load_config
from halfstep.trainer.models.gpt.gpt import GPT

VOCABULARY, ROWS, LENGTH = 8192, 8, 128
RATE, MATCH = 2e-3, "match_rms_adamw"
LOW = {"update": "split", "moments": "8bit"}
OURS, THEIRS = "halfstep Muon, split, 8-bit momentum", "torch Muon fp32"


def model_of(seed: int) -> GPT:
    config = load_config("gpt-small-cpu", [("model.vocab_size", VOCABULARY)])
    return GPT(dataclasses.replace(config.model, dropout=0.0), seed=seed)


def ours(model: nn.Module, **options) -> list[torch.optim.Optimizer]:
    return [Muon(muon_groups(model), lr=RATE, adjust_lr_fn=MATCH, **options)]


def theirs(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = muon_groups(model)
    matrices = torch.optim.Muon([p for _, p in first["params"]], lr=RATE, adjust_lr_fn=MATCH)
    groups = [
        {"params": [p for _, p in g["params"]], "weight_decay": g.get("weight_decay", 0.1)}
        for g in rest
    ]
    return [matrices, torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)]


def with_gradients(dtype: torch.dtype) -> GPT:
    """The model with random gradients."""
    model = model_of(0).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=generator) * 1e-3).to(dtype)
    return model


def tokens() -> torch.Tensor:
    """The bytes of Python's standard library."""
    paths = sorted(Path(statistics.__file__).parent.glob("*.py"))
    data = b"".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def loss_after(kind: str, seed: int, steps: int, data: torch.Tensor) -> tuple[float, float]:
    """The mean loss of the last 20 steps, and bytes per element of a matrix."""
    model = model_of(seed)
    names = [name for name, _ in muon_groups(model)[0]["params"]]
    if kind == OURS:
        precision = Precision("bf16-split,moments=8bit", model, ours(model))
    else:
        precision = Precision("bf16-mixed", model, theirs(model))
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        at = torch.randint(len(data) - LENGTH - 1, (ROWS,), generator=generator)
        rows = torch.stack([data[i : i + LENGTH + 1] for i in at.tolist()])
        with precision.autocast():
            total, count = model.loss_sum((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
            loss = total / count
        losses.append(precision.step(loss, max_norm=1.0).loss)
    matrices = [dict(model.named_parameters())[name] for name in names]
    held = list(matrices)
    for optimizer in precision.optimizers:
        for p in matrices:
            state = optimizer.state.get(p, {})
            held += [v for k, v in state.items() if k != "step" and isinstance(v, torch.Tensor)]
    size = sum(x.untyped_storage().nbytes() for x in held) / sum(p.numel() for p in matrices)
    return statistics.mean(losses[-20:]), size


def times(arguments: argparse.Namespace) -> dict[str, Any]:
    """A step of the optimizers alone, ours and torch's in turn."""
    made = {
        OURS: ours(with_gradients(torch.bfloat16), **LOW),
        THEIRS: theirs(with_gradients(torch.float32)),
    }
    taken: dict[str, list[float]] = {name: [] for name in made}
    for number in range(arguments.rounds + 2):  # two to make the state and touch its memory
        for name, optimizers in made.items():
            begin = time.perf_counter()
            for optimizer in optimizers:
                optimizer.step()
            if number > 1:
                taken[name].append(time.perf_counter() - begin)
    found = {name: summary(seconds) for name, seconds in taken.items()}
    return {"times": found, "ratio": shown(found, OURS, THEIRS)}


def shown(found: dict[str, dict[str, float]], one: str, other: str) -> float:
    """Print the times, and return the ratio of two medians."""
    for name, row in found.items():
        middle, best = row["median_seconds"] * 1e3, row["min_seconds"] * 1e3
        print(f"{name:<40} {middle:7.1f} ms, best {best:.1f}")
    ratio = found[one]["median_seconds"] / found[other]["median_seconds"]
    best = found[one]["min_seconds"] / found[other]["min_seconds"]
    print(f"{one} / {other}: {ratio:.3f}, of the best {best:.3f}", flush=True)
    return ratio


def losses(arguments: argparse.Namespace) -> dict[str, Any]:
    """What both have learnt after some steps, from several seeds."""
    data, found, size = tokens(), {}, {}
    for kind in (OURS, THEIRS):
        found[kind] = []
        for seed in arguments.seeds:
            loss, size[kind] = loss_after(kind, seed, arguments.steps, data)
            found[kind].append(loss)
            print(f"{kind:<40} seed {seed}: loss {loss:.4f}, {size[kind]:.3f} bytes", flush=True)
    apart = [a - b for a, b in zip(found[OURS], found[THEIRS], strict=True)]
    noise = statistics.stdev(found[THEIRS]) if len(apart) > 1 else float("nan")
    print(f"loss: {statistics.mean(apart):+.4f} apart, {noise:.4f} between torch's seeds")
    return {
        "losses": found, "loss_apart": statistics.mean(apart), "noise_of_seeds": noise,
        "bytes_per_element_of_a_matrix": size, "steps": arguments.steps, "seeds": arguments.seeds,
    }  # fmt: skip


PARTS = {"times": times, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--busy", action="store_true", help="note that others use the machine")
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    for part in arguments.parts:
        results = PARTS[part](arguments) | {"busy_machine": arguments.busy}
        results["threads"] = torch.get_num_threads()
        if not arguments.no_save:
            print(f"written: {save(f'muon-cpu-{part}', results, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
