"""Makes text classifiers from scratch: a randomly initialised BERT, a tokenizer from the texts.

From then on they are treated like a pretrained encoder: the same class trains them, and the saved
folder loads in ``transformers`` and can be trained further.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.models.pretrained.classifier import PretrainedClassifier, class_weights_tensor
from halfstep.trainer.models.pretrained.hub import quiet, require_library
from halfstep.trainer.models.pretrained.tokenizer import PretrainedTokenizer
from halfstep.trainer.models.pretrained.weights import set_dropout

SCRATCH = "scratch:"
"""Prefix of the names of models that are made from scratch, not loaded."""


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a named size; other settings are the defaults of ``BertConfig``."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    """Maximal number of ids of the tokenizer that is trained for it."""


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "tiny": Size(layers=2, heads=2, width=64, vocabulary=2048),
        "small": Size(layers=2, heads=4, width=128, vocabulary=4608),
        "base": Size(layers=6, heads=8, width=512, vocabulary=8192),
    }
)
"""0.2, 1.0 and 23 million parameters. **Source:** docs/decisions/0014-scratch-classifier.md."""

_SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
"""BERT's special tokens; in this order they get the ids 0 to 3."""
_SPACE = "▁"
"""The library's character for a space, which makes the space a part of the word after it."""


def scratch_size(source: str) -> Size:
    """Return the size that ``scratch:NAME`` names, or raise ConfigError."""
    name = source.removeprefix(SCRATCH)
    if name not in SIZES:
        allowed = ", ".join(SCRATCH + known for known in SIZES)
        raise ConfigError(f"there is no model {source!r}. Allowed: {allowed}")
    return SIZES[name]


def scratch_parameters(size: Size, vocab_size: int, max_length: int) -> int:
    """Return a lower bound of the number of parameters of such a model, without making it."""
    layers = size.layers * 12 * size.width**2
    return layers + (vocab_size + max_length) * size.width


def make_classifier(
    size: Size,
    names: Sequence[str],
    *,
    vocab_size: int,
    max_length: int,
    dropout: float | None = None,
    class_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    seed: int = 0,
) -> PretrainedClassifier:
    """Make a BERT classifier in fp32 on the CPU, in training mode, with weights from ``seed``.

    Args:
        size: Shape of the model.
        names: Names of the classes, in the order of their labels.
        vocab_size: Vocabulary size of the tokenizer.
        max_length: Number of positions: the longest text in tokens, special tokens included.
        dropout: All dropout probabilities; None: 0.1, the default of ``BertConfig``.
        class_weights: A weight for each class in the loss; None: 1.
        label_smoothing: Share in [0, 1) of each target that is spread over all classes.
        seed: Seed of the weights; the caller's generators are not touched.
    """
    transformers = require_library("transformers")
    config = transformers.BertConfig(
        vocab_size=vocab_size,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=max_length,
        pad_token_id=0,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
        problem_type="single_label_classification",
        attn_implementation="sdpa",
    )
    if dropout is not None:
        set_dropout(config, dropout)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.BertForSequenceClassification(config)
    weights_C = class_weights_tensor(class_weights, names)
    return PretrainedClassifier(model, tuple(names), weights_C, label_smoothing)


def train_tokenizer(texts: Sequence[str], vocab_size: int, max_length: int) -> PretrainedTokenizer:
    """Train a tokenizer of at most ``vocab_size`` ids on the texts, the same on every machine.

    Width and case of letters are folded (NFKC, lowercase). All characters become ids or, if there
    are too many, the most frequent ones (ties: lower code points first). Then pairs are merged
    (BPE) within words, which are separated by spaces, so that a Chinese phrase is one word. Text is
    always data: ``[CLS]`` inside a text never becomes the special id.

    Args:
        texts: The training texts only: validation texts must not influence the tokenizer.
        vocab_size: Maximal number of ids, at least 5; there are fewer if the texts give no more.
        max_length: Maximal number of ids of a text, special ones included.

    Raises:
        DataError: If no text holds a character.

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
    if not alphabet:
        raise DataError(
            f"no tokenizer can be trained: the {len(texts)} training texts hold no characters"
        )
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
    tokenizer = require_library("transformers").PreTrainedTokenizerFast(
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
