"""trl: its SFTTrainer over a GPT-2 and over low-rank adapters of one."""

from __future__ import annotations

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel
from trl import SFTConfig, SFTTrainer

from strangers.packages import attached
from strangers.packages.runs import Program, Run
from strangers.packages.tokenizers_made_here import PAIRS, SPECIAL, WORDS, tokenizer
from strangers.packages.trainers import LR, arguments


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(SPECIAL) + len(WORDS), n_positions=32, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=2, eos_token_id=3,
            pad_token_id=0,
        )
    )  # fmt: skip


def train(run: Run, adapters: LoraConfig | None = None) -> list[float]:
    torch.manual_seed(0)
    model = run.begin(gpt2())
    data = Dataset.from_dict({"text": [f"{first} because {second}" for first, second in PAIRS]})
    # bf16 is SFTConfig's default; the model as it stands trains in fp32
    rate = 10 * LR if adapters else LR
    settings = {"bf16": False, "learning_rate": rate * run.rate, "max_length": 16}

    def make(folder, way):
        return SFTTrainer(
            model.to(way.stored), arguments(folder, SFTConfig, **{**settings, **way.arguments}),
            train_dataset=data, processing_class=tokenizer(), peft_config=adapters, **way.trainer,
        )  # fmt: skip

    return attached.trained(run, rate, make)


ADAPTERS = LoraConfig(
    r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
)
PROGRAMS = [
    Program("SFTTrainer", "trl", train, attached.REFUSED, own_loss=True),
    Program(
        "SFTTrainer with LoRA", "trl", lambda run: train(run, ADAPTERS),
        own_loss=True,  # nothing is refused: peft keeps adapters in fp32
    ),
]  # fmt: skip
