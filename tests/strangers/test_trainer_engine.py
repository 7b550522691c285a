"""The Trainer of transformers under DDP and FSDP2, with one line of halfstep's."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

import halfstep
from halfstep.integrations.hf_trainer import attach
from strangers.engines import (
    POLICIES,
    ROWS,
    STEPS,
    Training,
    compared,
    held,
    launched,
    tell,
    tried,
    weights,
)

RATE = 1e-2


def trainer(kind: str, policy: str, folder: str) -> tuple[Any, list[float]]:
    """One that is about to train as the policy is asked for there, and where its losses will be."""
    import accelerate
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 33, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    ids = torch.randint(33, (STEPS * ROWS, 12), generator=torch.Generator().manual_seed(1))
    chosen, options, asked = halfstep.parse_policy(policy or "fp32"), {}, {}
    if chosen.needs_own_optimizer:
        kept = {"lr": RATE, "eps": 1e-3, "update": chosen.update}
        options = {"optimizer_cls_and_kwargs": (halfstep.optim.AdamW, kept)}
    if kind == "FSDP2":
        wrapped = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
        asked = {"fsdp": True, "fsdp_config": wrapped}
    settings = transformers.TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        max_steps=STEPS, save_steps=STEPS // 2, logging_steps=1, learning_rate=RATE, seed=3,
        adam_epsilon=1e-3, max_grad_norm=0.5, bf16=policy == "bf16-mixed",
        per_device_train_batch_size=ROWS // (1 if kind == "one" else 2), **asked,
    )  # fmt: skip
    if kind == "FSDP2":  # on a CPU Accelerate goes over to DDP without a word
        state = settings.distributed_state._shared_state
        state["distributed_type"] = accelerate.DistributedType.MULTI_GPU
    found = transformers.Trainer(
        model.to(chosen.param_dtype), settings,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids], **options,
    )  # fmt: skip
    losses: list[float] = []
    step = found.training_step
    if policy == "fp16-mixed":  # fp16=True is for GPUs
        step = halfstep.autocast(policy, "cpu")(step)
    found.training_step = lambda *given: (loss := step(*given), losses.append(loss.item()))[0]
    if policy:
        attach(found, scaler=policy == "fp16-mixed", lost_updates_every=1, health_every=1)
    return found, losses


def train(kind: str, policy: str) -> Training:
    """The whole training; from the middle, a new one that loads its state ends in the same bits."""
    folder = [tempfile.mkdtemp()]
    if kind != "one":
        trainer(kind, policy, folder[0])  # begins the ranks
        dist.broadcast_object_list(folder)
    run, losses = trainer(kind, policy, folder[0])
    run.train()
    again, rest = trainer(kind, policy, folder[0])
    again.train(resume_from_checkpoint=f"{folder[0]}/checkpoint-{STEPS // 2}")
    assert rest == losses[STEPS // 2 :]
    assert weights(again.model) == weights(run.model)
    if kind != "one":
        whole = torch.tensor(losses)
        dist.all_reduce(whole)
        losses = (whole / 2).tolist()
    norms = [log["grad_norm"] for log in run.state.log_history if "grad_norm" in log]
    return {"losses": losses, "norms": norms, "weights": weights(run.model)}


def main(*kinds: str) -> None:
    found = {k: {policy: tried(train, k, policy) for policy in POLICIES} for k in kinds}
    found["plain"] = {"": train(kinds[0], "")}
    tell(found)


@pytest.mark.strangers
def test_the_trainer_trains_what_one_process_does():
    version = pytest.importorskip("transformers").__version__
    alone, ranks = launched(__file__, 1, "one"), launched(__file__, 2, "DDP", "FSDP2")
    instead = {"bf16-master": ("update='split'", "bf16-split")}
    for kind in ("DDP", "FSDP2"):
        cells = compared(ranks[kind], alone["one"], alone["plain"][""], instead)
        held(f"Transformers Trainer, {kind}, `attach`", version, cells)


if __name__ == "__main__":
    main(*sys.argv[1:])
