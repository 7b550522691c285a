"""peft: low-rank adapters of a GPT-2, in fp32 and over a base that is stored in bf16."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from strangers.packages.hand_loop import by_hand
from strangers.packages.transformer_models import ROWS, gpt2, text


def adapted(dtype=torch.float32):
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(gpt2().to(dtype), config)


def made(name, model):
    return by_hand(
        name, "peft", model=model, batch=lambda draw: text(draw, ROWS), lr=1e-2,
        loss=lambda model, batch: model(**batch).loss,
    )  # fmt: skip


PROGRAMS = [
    made("LoRA of GPT-2", adapted),
    made("LoRA, base in bf16", lambda: adapted(torch.bfloat16)),
]
