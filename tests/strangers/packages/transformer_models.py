"""Models of transformers, small and from scratch, and what they are trained on here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from strangers.packages.hand_loop import by_hand

WORDS, LENGTH, ROWS = 64, 12, 4


def bert() -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            image_size=16, patch_size=4, num_labels=4, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def whisper() -> nn.Module:
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=WORDS, d_model=32, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
            decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=12,
            max_target_positions=LENGTH, pad_token_id=0, bos_token_id=0, eos_token_id=0,
            decoder_start_token_id=0,
            dropout=0.0, use_cache=False,
        )
    )  # fmt: skip


def mamba() -> nn.Module:
    return MambaForCausalLM(
        MambaConfig(
            vocab_size=WORDS, hidden_size=24, state_size=4, num_hidden_layers=2, use_cache=False
        )
    )


def words(draw: torch.Generator, rows: int) -> Tensor:
    return torch.randint(1, WORDS, (rows, LENGTH), generator=draw)


def classified(draw: torch.Generator, rows: int) -> dict[str, Tensor]:
    ids = words(draw, rows)
    return {"input_ids": ids, "labels": (ids[:, 0] > WORDS // 2).long()}


def text(draw: torch.Generator, rows: int) -> dict[str, Tensor]:
    ids = words(draw, rows)
    return {"input_ids": ids, "labels": ids.clone()}


def pictures(draw: torch.Generator, rows: int) -> dict[str, Tensor]:
    labels = torch.randint(4, (rows,), generator=draw)
    images = torch.randn(rows, 3, 16, 16, generator=draw) + labels.view(-1, 1, 1, 1)
    return {"pixel_values": images, "labels": labels}


def speech(draw: torch.Generator, rows: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(rows, 8, 24, generator=draw),
        "labels": words(draw, rows),
    }


@dataclass(frozen=True)
class Kind:
    """A model and its batches: ``data(generator, rows)``."""

    model: Callable[[], nn.Module]
    data: Callable[[torch.Generator, int], dict[str, Tensor]]


KINDS = {
    "BERT": Kind(bert, classified),
    "GPT-2": Kind(gpt2, text),
    "Llama": Kind(llama, text),
    "ViT": Kind(vit, pictures),
    "T5": Kind(t5, text),
    "Whisper": Kind(whisper, speech),
    "Mamba": Kind(mamba, text),
}


def made(name: str, kind: Kind):
    return by_hand(
        name, "transformers", model=kind.model, batch=lambda draw: kind.data(draw, ROWS),
        loss=lambda model, batch: model(**batch).loss,
    )  # fmt: skip


PROGRAMS = [made(name, kind) for name, kind in KINDS.items()]
