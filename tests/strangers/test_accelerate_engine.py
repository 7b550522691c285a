"""Accelerate's DDP and FSDP2: ``Precision`` over what it has prepared, and ``attach`` inside it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import halfstep
from halfstep.integrations.accelerate import attach
from strangers.engines import (
    POLICIES,
    STEPS,
    Training,
    batches,
    compared,
    held,
    launched,
    loss_of,
    made,
    tried,
    weights,
    whole,
)

PARTS = 2  # micro-batches a step


def accelerator(kind: str, mixed_precision: str = "no") -> Any:
    import accelerate
    from accelerate import state

    for kept in (state.AcceleratorState, state.PartialState):
        kept._shared_state.clear()
    state.GradientState._reset_state()
    options: dict[str, Any] = {}
    if state.PartialState(cpu=True).num_processes > 1 and kind == "FSDP2":
        # Accelerate shards on accelerators alone, and on a CPU goes over to DDP without a word.
        state.PartialState._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_GPU
        options["fsdp_plugin"] = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
    return accelerate.Accelerator(
        cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=PARTS, **options
    )


class Beside:
    """Accelerate prepares in fp32, and ``Precision`` does the rest."""

    def __init__(self, kind: str, policy: str) -> None:
        self.acc, model = accelerator(kind), made()
        own = halfstep.parse_policy(policy).needs_own_optimizer
        optimizers: Any = halfstep.optim if own else torch.optim
        optimizer = optimizers.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        self.model, prepared = self.acc.prepare(model, optimizer)
        self.precision = halfstep.Precision(policy, self.model, prepared.optimizer)
        self.acc.register_for_checkpointing(self.precision)

    def part(self, x: Tensor) -> tuple[Tensor, float | None]:
        with self.precision.autocast():
            loss = loss_of(self.model, x)
        self.precision.backward(loss / PARTS)
        last = self.acc.sync_gradients
        return loss, self.precision.step(max_norm=0.5).grad_norm if last else None


class Inside:
    """Accelerate's own loop, with a scaler or a guard of halfstep's; or plain, for no policy."""

    def __init__(self, kind: str, policy: str) -> None:
        self.acc = accelerator(kind, "bf16" if policy == "bf16-mixed" else "no")
        self.scaled, self.stored = policy == "fp16-mixed", torch.float32
        optimizers, options = torch.optim, {}
        if policy:
            chosen = halfstep.parse_policy(policy)
            self.stored = chosen.param_dtype
            attach(self.acc, scaler=self.scaled)
            if chosen.needs_own_optimizer:
                optimizers, options = halfstep.optim, {"update": chosen.update}
        model = made().to(self.stored)
        optimizer = optimizers.AdamW(model.parameters(), lr=0.01, eps=1e-3, **options)
        self.model, self.optimizer = self.acc.prepare(model, optimizer)

    def part(self, x: Tensor) -> tuple[Tensor, float | None]:
        with torch.autocast("cpu", torch.float16, enabled=self.scaled):
            loss = loss_of(self.model, x.to(self.stored))
        self.acc.backward(loss)
        last = self.acc.sync_gradients
        norm = self.acc.clip_grad_norm_(self.model.parameters(), 0.5) if last else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, None if norm is None else float(whole(norm))


def steps(run: Beside | Inside, parts: Iterable[Tensor]) -> Training:
    losses, norms = [], []
    for x in parts:
        with run.acc.accumulate(run.model):
            loss, norm = run.part(x)
        losses.append(float(run.acc.reduce(loss.detach(), "mean")))
        norms += [] if norm is None else [norm]
    return {"losses": losses, "norms": norms, "weights": weights(run.model)}


def train(way: type[Beside | Inside], kind: str, policy: str) -> Training:
    """The whole training; from the middle, a new one that loads its state ends in the same bits."""
    run = way(kind, policy)
    parts = list(batches(STEPS * PARTS, run.acc.process_index, run.acc.num_processes))
    first = steps(run, parts[:STEPS])
    folder = [tempfile.mkdtemp()]
    if run.acc.num_processes > 1:
        dist.broadcast_object_list(folder)
    run.acc.save_state(folder[0])
    second = steps(run, parts[STEPS:])
    resumed = way(kind, policy)
    resumed.acc.load_state(folder[0])
    assert steps(resumed, parts[STEPS:]) == second
    return {**second, **{name: [*first[name], *second[name]] for name in ("losses", "norms")}}


def main(*kinds: str) -> None:
    found = {
        f"{way.__name__} {kind}": {policy: tried(train, way, kind, policy) for policy in POLICIES}
        for way in (Beside, Inside)
        for kind in kinds
    }
    found["plain"] = {"": train(Inside, kinds[0], "")}
    print(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.strangers
def test_accelerate_trains_what_one_process_does():
    version = pytest.importorskip("accelerate").__version__
    alone, ranks = launched(__file__, 1, "one"), launched(__file__, 2, "DDP", "FSDP2")
    plain = alone["plain"][""]
    for kind in ("DDP", "FSDP2"):
        cells = compared(ranks[f"Beside {kind}"], alone["Beside one"], plain)
        held(f"Accelerate, {kind}, `Precision`", version, cells)
        instead = {"bf16-master": ("update='split'", "bf16-split")}
        cells = compared(ranks[f"Inside {kind}"], alone["Inside one"], plain, instead)
        held(f"Accelerate, {kind}, `attach`", version, cells)


if __name__ == "__main__":
    main(*sys.argv[1:])
