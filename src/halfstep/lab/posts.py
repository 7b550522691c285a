"""What experiments on an encoder train: a small BERT that reads the emotion of a post.

The posts are the synthetic ones of ``halfstep data emotions-sample``, or any labelled file. A
character is a token, so that no tokenizer has to be trained, nor a package installed.

Shapes: B posts, T characters of the longest of them, W channels, C classes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep.errors import DataError
from halfstep.lab.material import Batch
from halfstep.precision.step import Precision
from halfstep.trainer.data.emotions import emotions
from halfstep.trainer.data.labelled.config import LabelledConfig
from halfstep.trainer.data.labelled.texts import read_named

PADDING, CLS, UNKNOWN = range(3)
CHARACTERS, LENGTH, SAMPLE, MOST_HELD_OUT, LEAST = 4000, 64, 3000, 200, 40
"""Ids at most, characters of a post that are read, posts of the sample, posts held out at most,
and posts of a file at least."""


@dataclass(frozen=True)
class Posts:
    """Posts as ids of characters, padded, and their classes; some are held out."""

    classes: tuple[str, ...]
    characters: int
    train: Batch
    held_out: Batch


@cache
def posts(path: str = "") -> Posts:
    """The synthetic posts, or those of a labelled file: a column of texts and one of labels.

    Raises:
        DataError: If the file cannot be used, with the place; or if it has too few posts, or one
            class alone, of which there is nothing to learn.
    """
    if path:
        found = read_named((path,), LabelledConfig(), "train", has_options=False)
        texts, labels = found.texts, found.labels
    else:
        made = emotions(SAMPLE)[1]
        texts, labels = [post.text for post in made], [post.label for post in made]
    if len(texts) < LEAST:
        raise DataError(f"{path}: {len(texts)} texts; the experiment needs at least {LEAST}")
    classes = {label: number for number, label in enumerate(sorted(set(labels)))}
    if len(classes) < 2:
        only = f"every label is {labels[0]!r:.80}"
        raise DataError(f"{path}: {only}; the experiment needs at least two classes")
    order = random.Random(0).sample(range(len(texts)), len(texts))
    cut = min(len(texts) // 10, MOST_HELD_OUT)
    held_out, kept = order[:cut], order[cut:]
    counts = Counter(character for i in kept for character in texts[i])
    common = sorted(counts, key=lambda character: (-counts[character], character))
    ids = {character: UNKNOWN + 1 + i for i, character in enumerate(common[:CHARACTERS])}

    def part(chosen: Sequence[int]) -> Batch:
        of_posts = torch.full((len(chosen), LENGTH + 1), PADDING)
        for row, i in enumerate(chosen):
            of_post = [CLS, *(ids.get(character, UNKNOWN) for character in texts[i][:LENGTH])]
            of_posts[row, : len(of_post)] = torch.tensor(of_post)
        return of_posts, torch.tensor([classes[labels[i]] for i in chosen])

    return Posts(tuple(classes), UNKNOWN + 1 + len(ids), part(kept), part(held_out))


def batches(source: Posts, size: int, seed: int) -> Iterator[Batch]:
    """Posts in random order without end, each batch cut to its longest post."""
    ids, labels = source.train
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(ids), (size,), generator=generator)
        yield _cut(ids[rows]), labels[rows]


def _cut(ids: Tensor) -> Tensor:
    return ids[:, : int((ids != PADDING).sum(1).max())]


class Bert(nn.Module):
    """A BERT with a class for each post: post-norm, GELU, learned positions, a pooled ``[CLS]``.

    **Source:** Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", NAACL 2019.
    """

    def __init__(
        self, source: Posts, *, layers: int = 2, heads: int = 2, width: int = 64, seed: int = 0
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(source.characters, width)
            self.positions = nn.Embedding(LENGTH + 1, width)
            self.norm = nn.LayerNorm(width)
            layer = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
            )
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.pooler = nn.Linear(width, width)
            self.head = nn.Linear(width, len(source.classes))
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The logits, of shape (B, C)."""
        places = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        h_BTW = self.norm(self.tokens(ids_BT) + self.positions(places))
        h_BTW = self.layers(h_BTW, src_key_padding_mask=ids_BT == PADDING)
        logits: Tensor = self.head(torch.tanh(self.pooler(h_BTW[:, 0])))
        return logits

    def loss_sum(self, batch: Batch) -> tuple[Tensor, int]:
        """The sum of the posts' losses, and their number."""
        ids_BT, labels_B = batch
        logits_BC = self(ids_BT)
        return functional.cross_entropy(logits_BC, labels_B, reduction="sum"), len(labels_B)


@torch.no_grad()
def held_out(precision: Precision, model: Bert, source: Posts) -> tuple[float, float]:
    """Loss and accuracy on the posts held out, in the policy's precision."""
    ids_BT, labels_B = _cut(source.held_out[0]), source.held_out[1]
    with precision.autocast():
        logits_BC = model(ids_BT).float()
    loss = functional.cross_entropy(logits_BC, labels_B)
    return float(loss), float((logits_BC.argmax(1) == labels_B).double().mean())
