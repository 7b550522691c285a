"""sentence-transformers: its losses in a loop of one's own, and in its Trainer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    CoSENTLoss,
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import nn
from transformers import BertConfig, BertModel

from strangers.packages import attached
from strangers.packages.hand_loop import by_hand
from strangers.packages.runs import Program, Run
from strangers.packages.tokenizers_made_here import PAIRS, SPECIAL, WORDS, tokenizer
from strangers.packages.trainers import LR, arguments

ROWS = 4


def encoder() -> SentenceTransformer:
    """A BERT from scratch with mean pooling; the package reads it from a folder."""
    body = BertModel(
        BertConfig(
            vocab_size=len(SPECIAL) + len(WORDS), hidden_size=32, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=64, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, max_position_embeddings=32,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        body.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        words = Transformer(str(Path(folder)))
    pooling = Pooling(words.get_embedding_dimension())
    return SentenceTransformer(modules=[words, pooling], device="cpu")


def features(model: SentenceTransformer, sentences: list[str]) -> dict[str, torch.Tensor]:
    encoded = model.tokenizer(sentences, padding=True, return_tensors="pt")
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def pairs(draw: torch.Generator) -> tuple[list[str], list[str], torch.Tensor]:
    chosen = torch.randperm(len(PAIRS), generator=draw)[:ROWS].tolist()
    first, second = zip(*(PAIRS[i] for i in chosen), strict=True)
    return [*first], [*second], torch.linspace(0, 1, ROWS)


def loss_by(kind):
    def loss(model: nn.Module, batch) -> torch.Tensor:
        first, second, labels = batch
        return kind(model)([features(model, first), features(model, second)], labels)

    return loss


def made(kind, lr: float = 3e-4, amplifies: float = 1.0) -> Program:
    return by_hand(
        kind.__name__, "sentence-transformers", model=encoder, batch=pairs, loss=loss_by(kind),
        lr=lr, amplifies=amplifies,
    )  # fmt: skip


def train(run: Run) -> list[float]:
    torch.manual_seed(0)
    model = run.begin(encoder())
    first, second = (list(side) for side in zip(*PAIRS, strict=True))
    data = Dataset.from_dict({"anchor": first, "positive": second})
    kind = SentenceTransformerTrainingArguments

    def make(folder, way):
        stored = model.to(way.stored)
        given = arguments(folder, kind, **{"learning_rate": LR * run.rate, **way.arguments})
        loss = MultipleNegativesRankingLoss(stored)
        return SentenceTransformerTrainer(
            stored, given, train_dataset=data, loss=loss, **way.trainer
        )

    return attached.trained(run, LR, make)


PROGRAMS = [
    # cosines are products, which *-mixed rounds; the loss multiplies them by 20
    made(MultipleNegativesRankingLoss, amplifies=4.0),
    made(CosineSimilarityLoss),
    made(CoSENTLoss, lr=1e-3),
    Program(
        "SentenceTransformerTrainer", "sentence-transformers", train, attached.lines,
        attached.REFUSED, own_loss=True, amplifies=2.0,  # the same loss, in fewer steps
    ),
]  # fmt: skip
