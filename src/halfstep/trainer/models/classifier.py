"""Text classifiers: any Hugging Face encoder, or a BERT with random weights and its own tokenizer.

A model from scratch is treated like a pretrained encoder from then on: the same class trains it,
and the saved folder loads in ``transformers`` and can be trained further.

Shapes: B texts, T tokens, C classes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional

from halfstep.errors import ConfigError
from halfstep.trainer.models import IGNORE_INDEX
from halfstep.trainer.models.pretrained import (
    Pretrained,
    PretrainedTokenizer,
    open_folder,
    quiet,
)

ClassifierBatch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""(ids_BT int64, mask_BT bool, labels_B int64 with -100 for "does not count")."""


class PretrainedClassifier(Pretrained):
    """A ``transformers`` classifier with loss sums.

    Attributes:
        names: Names of the classes.
        head_is_new: Whether the classification head was drawn rather than loaded.
    """

    def __init__(
        self,
        model: Any,
        names: Sequence[str],
        label_smoothing: float = 0.0,
        head_is_new: bool = False,
    ) -> None:
        super().__init__(model)
        self.names = tuple(names)
        self.label_smoothing = label_smoothing
        self.head_is_new = head_is_new

    def logits(self, batch: ClassifierBatch) -> Tensor:
        """Compute logits ``(B, C)`` in fp32; the batch's labels are ignored."""
        ids_BT, mask_BT = batch[:2]
        out: Tensor = self.model(input_ids=ids_BT, attention_mask=mask_BT.long()).logits
        return out.float()

    def loss_sum(self, batch: ClassifierBatch) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy and the number of labels that count, fp32 scalars.

        Targets are smoothed in training only.

        **Source:** Szegedy et al., "Rethinking the Inception Architecture", CVPR 2016, section 7.
        """
        logits_BC, labels_B = self.logits(batch), batch[2]
        loss = functional.cross_entropy(
            logits_BC,
            labels_B,
            reduction="sum",
            label_smoothing=self.label_smoothing if self.training else 0.0,
        )
        return loss, (labels_B != IGNORE_INDEX).sum().to(loss.dtype)

    def read_back(self, folder: Path) -> dict[str, Tensor]:
        """Read the weights, with a head of the folder's own."""
        return dict(open_classifier(folder, None).named_parameters())


def open_classifier(
    source: str | os.PathLike[str],
    names: Sequence[str] | None,
    *,
    label_smoothing: float = 0.0,
    seed: int = 0,
    mapped: bool = False,
) -> PretrainedClassifier:
    """Load a pretrained encoder with a head for these classes, in fp32 on the CPU, in train mode.

    The head is the folder's own if its ``id2label`` equals ``names`` in order (None: whatever the
    folder says); otherwise it is drawn from ``seed``. For ``mapped`` see :func:`open_folder`.

    Raises:
        ConfigError: If the source or the architecture cannot be used.
        CheckpointError: If the folder is damaged or lacks weights of the encoder.
    """
    folder = open_folder(source, mapped=mapped)
    own = [name for _, name in sorted(folder.config.id2label.items())]
    names = own if names is None else list(names)
    _name_classes(folder.config, names)
    model, drawn = folder.build(
        "AutoModelForSequenceClassification",
        torch.float32,
        head="kept" if names == own else "new",
        seed=seed,
    )
    is_new = any(".pooler." not in name for name in drawn)
    return PretrainedClassifier(model, names, label_smoothing, is_new)


def _name_classes(config: Any, names: Sequence[str]) -> None:
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.problem_type = "single_label_classification"


# From scratch.


SCRATCH = "scratch:"
"""Prefix of the names of models that are made from scratch, not loaded."""


SIZES = {"tiny": (2, 2, 64, 2048), "small": (2, 4, 128, 4608), "base": (6, 8, 512, 8192)}
"""Layers, heads and width (0.2, 1.0 and 23 million parameters), and the most ids of the tokenizer.

Other settings are the defaults of ``BertConfig``.

**Source:** docs/decisions/0014-scratch-classifier.md.
"""
_SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
"""BERT's special tokens; in this order they get the ids 0 to 3."""
_SPACE = "▁"
"""The library's character for a space, which makes the space a part of the word after it."""


def scratch_size(source: str) -> tuple[int, int, int, int]:
    """Return the entry of ``SIZES`` that ``scratch:NAME`` names, or raise ConfigError."""
    name = source.removeprefix(SCRATCH)
    if name not in SIZES:
        allowed = ", ".join(SCRATCH + known for known in SIZES)
        raise ConfigError(f"there is no model {source!r}. Allowed: {allowed}")
    return SIZES[name]


def make_classifier(
    size: tuple[int, int, int, int],
    names: Sequence[str],
    *,
    vocab_size: int,
    max_length: int,
    label_smoothing: float = 0.0,
    seed: int = 0,
) -> PretrainedClassifier:
    """Make a BERT classifier in fp32 on the CPU, in training mode, with weights from ``seed``.

    ``max_length`` is the number of positions. The other arguments are those of
    :func:`open_classifier`.
    """
    transformers = import_module("transformers")
    layers, heads, width, _ = size
    config = transformers.BertConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max_length,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    _name_classes(config, names)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.BertForSequenceClassification(config)
    return PretrainedClassifier(model, names, label_smoothing)


def train_tokenizer(texts: Sequence[str], vocab_size: int, max_length: int) -> PretrainedTokenizer:
    """Train a tokenizer of at most ``vocab_size`` ids on the texts, the same on every machine.

    Width and case of letters are folded (NFKC, lowercase). All characters become ids or, if there
    are too many, the most frequent ones (ties: lower code points first). Then pairs are merged
    (BPE) within words, which are separated by spaces, so that a Chinese phrase is one word. Text is
    always data: ``[CLS]`` inside a text never becomes the special id.

    **Source:** Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", ACL
    2016.
    """
    special = list(_SPECIAL.values())
    engine = Tokenizer(models.BPE(unk_token=_SPECIAL["unk_token"]))
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    # The space before a word distinguishes it from the same letters inside of another word.
    engine.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never")
    # Select the alphabet here, as the library breaks ties at the limit by the order of a hash map.
    # A character in the initial alphabet counts as more frequent than any other.
    alphabet = _most_frequent(texts, engine.normalizer, max(vocab_size - len(special), 1))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair seen once says nothing about other texts
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer=trainer)
    engine.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = import_module("transformers").PreTrainedTokenizerFast(
        tokenizer_object=engine,
        model_max_length=max_length,
        split_special_tokens=True,
        **_SPECIAL,
    )
    return PretrainedTokenizer(tokenizer, max_length)


def _most_frequent(texts: Iterable[str], normalizer: Any, limit: int) -> list[str]:
    """Return the most frequent characters of normalized texts; equal counts by code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    if " " in counts:
        counts[_SPACE] += counts.pop(" ")
    return sorted(counts, key=lambda character: (-counts[character], character))[:limit]
