"""Tiny models of Hugging Face architectures with random weights, and one batch for each to learn.

Every loss is the model's own: ``labels`` are in the batch. A batch is fixed and random, so that
twenty steps learn it by heart and the loss must fall.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROWS, LENGTH, WORDS, CLASSES, SIDE = 4, 10, 61, 3, 16
Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        make: A new model, the same each time under the same seed.
        batch: What it is called with, its labels included.
        tied: Pairs of parameters that are one tensor.
        lr: AdamW's, large enough that twenty steps are seen.
        keep: What 16-bit weights are refused for, and the rule that the refusal names.
        noise: How names of parameters end whose true gradient is 0: biases of keys, which add one
            number to all scores of a query, and softmax ignores that. What they get is rounding.
    """

    make: Callable[..., nn.Module]
    batch: Callable[[], Batch]
    tied: tuple[tuple[str, str], ...] = ()
    lr: float = 3e-3
    keep: str = ""
    noise: str = ""

    def is_noise(self, parameter: str) -> bool:
        """Whether the gradient of this parameter is nothing but rounding."""
        return bool(self.noise) and parameter.endswith(self.noise)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def words(length: int = LENGTH) -> Tensor:
    """Random tokens; 0 to 3 are left to padding and the like."""
    return torch.randint(4, WORDS, (ROWS, length), generator=_seeded())


def padded() -> Tensor:
    """A mask of ones with two rows that are padded at their end."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[1, -3:] = 0
    mask[2, -1:] = 0
    return mask


def images() -> Tensor:
    return torch.randn(ROWS, 3, SIDE, SIDE, generator=_seeded())


def classes() -> Tensor:
    return torch.arange(ROWS) % CLASSES


def text_classes() -> Batch:
    return {"input_ids": words(), "attention_mask": padded(), "labels": classes()}


def masked_words() -> Batch:
    labels = torch.where(padded() == 1, words(), -100)
    hidden = words().clone()
    hidden[:, ::3] = 3
    return {"input_ids": hidden, "attention_mask": padded(), "labels": labels}


def next_words() -> Batch:
    labels = torch.where(padded() == 1, words(), -100)
    return {"input_ids": words(), "attention_mask": padded(), "labels": labels}


def next_words_unpadded() -> Batch:
    return {"input_ids": words(), "labels": words()}


def translation() -> Batch:
    return {"input_ids": words(), "attention_mask": padded(), "labels": words(6)}


def image_classes() -> Batch:
    return {"pixel_values": images(), "labels": classes()}


def speech() -> Batch:
    return {
        "input_features": torch.randn(ROWS, 16, 20, generator=_seeded()),
        "labels": words(6),
    }


def captions() -> Batch:
    ids = words()
    ids[:, -1] = WORDS - 1  # the end token, whose place CLIP reads
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images(),
        "return_loss": True,
    }  # fmt: skip


def _make(model: str, config: str, **values: Any) -> Callable[..., nn.Module]:
    def make(**changes: Any) -> nn.Module:
        attention = changes.pop("attn_implementation", None)
        made = getattr(transformers, config)(**{**values, **changes})
        if attention is not None:
            made._attn_implementation = attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            return getattr(transformers, model)(made).train()

    return make


_BERT = dict(
    vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=48, max_position_embeddings=16, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, num_labels=CLASSES, pad_token_id=0,
)  # fmt: skip
_LLAMA = dict(
    vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=48, max_position_embeddings=32, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_TOWER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    projection_dim=16,
)  # fmt: skip


def _clip(**changes: Any) -> nn.Module:
    text = _TOWER | dict(
        vocab_size=WORDS, max_position_embeddings=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=WORDS - 1,
    )  # fmt: skip
    vision = _TOWER | dict(image_size=SIDE, patch_size=8)
    return _make(
        "CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16
    )(**changes)


ZOO = {
    "bert": Case(
        _make("BertForSequenceClassification", "BertConfig", **_BERT), text_classes,
        noise="key.bias",
    ),
    "roberta": Case(
        _make("RobertaForMaskedLM", "RobertaConfig", **_BERT),
        masked_words,
        tied=(("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),),
        noise="key.bias",
    ),
    "distilbert": Case(
        _make(
            "DistilBertForSequenceClassification", "DistilBertConfig",
            vocab_size=WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=48,
            max_position_embeddings=16, dropout=0.1, attention_dropout=0.1, num_labels=CLASSES,
            pad_token_id=0,
        ),
        text_classes,
        noise="k_lin.bias",
    ),
    "albert": Case(
        _make("AlbertForMaskedLM", "AlbertConfig", **_BERT, embedding_size=16),
        masked_words,
        tied=(("predictions.decoder.weight", "albert.embeddings.word_embeddings.weight"),),
        noise="key.bias",
    ),
    "gpt2": Case(
        _make(
            "GPT2LMHeadModel", "GPT2Config",
            vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=1,
            eos_token_id=2, pad_token_id=0,
        ),  # with its dropout of 0.1
        next_words,
        tied=(("lm_head.weight", "transformer.wte.weight"),),
    ),
    "llama": Case(_make("LlamaForCausalLM", "LlamaConfig", **_LLAMA), next_words),
    "qwen2": Case(
        _make("Qwen2ForCausalLM", "Qwen2Config", **_LLAMA, tie_word_embeddings=True),
        next_words,
        tied=(("lm_head.weight", "model.embed_tokens.weight"),),
    ),
    "qwen3": Case(_make("Qwen3ForCausalLM", "Qwen3Config", **_LLAMA, head_dim=8), next_words),
    "mistral": Case(
        _make("MistralForCausalLM", "MistralConfig", **_LLAMA, sliding_window=4), next_words
    ),
    "gemma2": Case(
        _make(
            "Gemma2ForCausalLM", "Gemma2Config", **_LLAMA, head_dim=8, sliding_window=4,
            query_pre_attn_scalar=8,
        ),
        next_words,
        tied=(("lm_head.weight", "model.embed_tokens.weight"),),
    ),
    "t5": Case(
        _make(
            "T5ForConditionalGeneration", "T5Config",
            vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=1,
            num_heads=4,
            dropout_rate=0.1, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        ),
        translation,
        tied=(
            ("encoder.embed_tokens.weight", "shared.weight"),
            ("decoder.embed_tokens.weight", "shared.weight"),
        ),
    ),
    "vit": Case(
        _make(
            "ViTForImageClassification", "ViTConfig",
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
            image_size=SIDE, patch_size=8, num_labels=CLASSES,
        ),
        image_classes,
        noise="k_proj.bias",
    ),
    "convnext": Case(
        _make(
            "ConvNextForImageClassification", "ConvNextConfig",
            num_channels=3, patch_size=2, num_stages=2, hidden_sizes=[16, 32], depths=[1, 1],
            num_labels=CLASSES,
        ),
        image_classes,
    ),
    "resnet": Case(
        _make(
            "ResNetForImageClassification", "ResNetConfig",
            embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], num_labels=CLASSES,
        ),
        image_classes,
        lr=1e-3,  # its norms of four rows make much of every rounding
        keep="type:BatchNorm2d",
    ),
    "whisper": Case(
        _make(
            "WhisperForConditionalGeneration", "WhisperConfig",
            vocab_size=WORDS, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=1,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=48, max_source_positions=10, max_target_positions=16,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            suppress_tokens=None, begin_suppress_tokens=None,
        ),
        speech,
        tied=(("proj_out.weight", "model.decoder.embed_tokens.weight"),),
    ),
    "clip": Case(_clip, captions, noise="k_proj.bias"),
    "mamba": Case(
        _make(
            "MambaForCausalLM", "MambaConfig",
            vocab_size=WORDS, hidden_size=32, state_size=8, num_hidden_layers=2, conv_kernel=3,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ),
        next_words_unpadded,
        tied=(("lm_head.weight", "backbone.embeddings.weight"),),
    ),
}  # fmt: skip
