"""Gradients released during backward: the bytes of gradients that exist at once, and a step's time.

    python benchmarks/release_cpu.py [--rounds N] [--configs NAME ...] [--no-save]

The same GPT is trained with and without ``release_gradients``, step by step in turn, in one
process: bf16-split24 weights with 8-bit moments, no clipping, one micro-batch. Gradients count from
the moment when an operation of the backward returns them, by their storages, until these are freed.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from common import save, summary
from halfstep.optim import AdamW
from halfstep.precision.step import Precision
from halfstep.trainer.config.config import load_config
from halfstep.trainer.models.gpt.gpt import GPT

POLICY = "bf16-split24,moments=8bit"
BATCHES = {"gpt-small-cpu": (8, 256), "gpt2": (1, 128)}  # rows, tokens
VOCABULARY = {"gpt-small-cpu": 8192}


class GradientsAlive:
    """Counts the bytes of parameters' gradients that exist at once, in the backward of a loss."""

    def __init__(self, loss: Tensor) -> None:
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        waiting, seen = [loss.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            edges = [next_node for next_node, _ in node.next_functions]
            at = [i for i, n in enumerate(edges) if n is not None and "Accumulate" in n.name()]
            if at:
                node.register_hook(partial(self._born, at))
            waiting += edges

    def _born(self, at: list[int], gradients: Any, _: Any) -> None:
        for index in at:
            if gradients[index] is not None:
                storage = gradients[index].untyped_storage()
                self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {k: (s, n) for k, (s, n) in self._alive.items() if not s.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


def made(name: str, release: bool) -> tuple[GPT, Precision]:
    sizes = [("model.vocab_size", VOCABULARY.get(name, 50257)), ("model.dropout", 0.0)]
    model = GPT(load_config(name, sizes).model, seed=0)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    return model, Precision(POLICY, model, optimizer, release_gradients=release)


def step(name: str, model: GPT, precision: Precision, number: int) -> tuple[float, int]:
    """A step's seconds, and the peak bytes of its gradients; the count is not timed."""
    rows, length = BATCHES[name]
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(model.config.vocab_size, (rows, length + 1), generator=generator)
    begin = time.perf_counter()
    with precision.autocast():
        total, count = model.loss_sum((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        loss = total / count
    seconds = time.perf_counter() - begin
    alive = GradientsAlive(loss) if number == 0 else None
    begin = time.perf_counter()
    precision.step(loss)
    seconds += time.perf_counter() - begin
    return seconds, 0 if alive is None else alive.peak


def measured(name: str, rounds: int) -> dict[str, Any]:
    pairs = {release: made(name, release) for release in (False, True)}
    taken: dict[bool, list[float]] = {False: [], True: []}
    peaks = {}
    for number in range(rounds + 2):  # two to make the state and touch its memory
        for release, (model, precision) in pairs.items():
            seconds, peak = step(name, model, precision, number)
            if number == 0:
                peaks[release] = peak
            elif number > 1:
                taken[release].append(seconds)
    (kept, _), (released, precision) = pairs[False], pairs[True]
    same = all(map(torch.equal, kept.parameters(), released.parameters()))
    count = sum(p.numel() for p in released.parameters())
    held = list(released.parameters())
    for state in precision.optimizers[0].state.values():
        held += [v for k, v in state.items() if k != "step"]
    found = {
        "parameters": count,
        "state_bytes_per_parameter": sum(t.untyped_storage().nbytes() for t in held) / count,
        "same_weights_after": rounds + 2 if same else 0,
        "rows_and_tokens": BATCHES[name],
    }
    for release, key in ((False, "kept"), (True, "released")):
        found[key] = {"gradient_bytes_per_parameter": peaks[release] / count,
                      **summary(taken[release])}  # fmt: skip
    found["ratio"] = found["released"]["median_seconds"] / found["kept"]["median_seconds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--configs", nargs="+", default=[*BATCHES], choices=[*BATCHES])
    parser.add_argument("--busy", action="store_true", help="note that others use the machine")
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.configs:
        found = results[name] = measured(name, arguments.rounds)
        print(f"{name}: {found['parameters']:,} parameters, weights and state "
              f"{found['state_bytes_per_parameter']:.3f} bytes each, the same weights after "
              f"{found['same_weights_after']} steps")  # fmt: skip
        for key in ("kept", "released"):
            row = found[key]
            median, best = row["median_seconds"] * 1e3, row["min_seconds"] * 1e3
            print(f"  {key:<9} gradients {row['gradient_bytes_per_parameter']:.3f} bytes, step "
                  f"{median:.0f} ms, best {best:.0f}")  # fmt: skip
        print(f"  ratio of medians {found['ratio']:.3f}", flush=True)
    if not arguments.no_save:
        content = {"configs": results, "busy_machine": arguments.busy}
        print(f"written: {save('release-cpu', content, torch.device('cpu'))}")


if __name__ == "__main__":
    main()
