"""Text classifiers from random weights: a BERT of ``transformers``, a tokenizer of the texts.

Once they are made they go the way of a pretrained encoder: the same class trains them, and the
folder that is saved loads in ``transformers`` and can be trained on.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.models.pretrained.classifier import PretrainedClassifier, class_weights_tensor
from halfstep.trainer.models.pretrained.folder import read_json_object
from halfstep.trainer.models.pretrained.hub import quiet, require_library
from halfstep.trainer.models.pretrained.tokenizer import PretrainedTokenizer
from halfstep.trainer.models.pretrained.weights import set_dropout

SCRATCH = "scratch:"
"""What the name of a model begins with that is made and not loaded."""


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a named size; the rest is as ``BertConfig`` has it."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    """Most token ids of the tokenizer that is trained for it."""


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "tiny": Size(layers=2, heads=2, width=64, vocabulary=2048),
        "small": Size(layers=2, heads=4, width=128, vocabulary=4608),
        "base": Size(layers=6, heads=8, width=512, vocabulary=8192),
    }
)
"""0.2, 1.0 and 23 million parameters. **Source:** docs/decisions/0014-scratch-classifier.md."""

_SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
"""BERT's names; in this order they are ids 0 to 3."""
_SPACE = "▁"
"""What the library writes for a space, so that it stays a part of the word after it."""


def scratch_size(source: str) -> Size:
    """The size that ``scratch:NAME`` means, or a ConfigError."""
    name = source.removeprefix(SCRATCH)
    if name not in SIZES:
        near = difflib.get_close_matches(name, SIZES, n=1)
        hint = f", did you mean '{SCRATCH}{near[0]}'" if near else ""
        allowed = ", ".join(SCRATCH + known for known in SIZES)
        raise ConfigError(f"there is no model {source!r}{hint}? Allowed: {allowed}")
    return SIZES[name]


def refuse_old_run(run: Path) -> None:
    """Raises ConfigError for a run of the encoder that version 0.1 made: nothing can go on."""
    file = run / "tokenizer" / "tokenizer_config.json"
    if file.is_file() and read_json_object(file).get("halfstep_tokenizer") == "text":
        raise ConfigError(
            f"{run} holds a run of the classifier that an earlier halfstep made from scratch, "
            "which this one cannot resume; start a new run"
        )


def scratch_parameters(size: Size, vocab_size: int, max_length: int) -> int:
    """How many parameters such a model has at least, without making it."""
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
    """A BERT classifier in fp32 on the CPU, in training mode, with weights drawn from ``seed``.

    Args:
        size: Its shape.
        names: Of the classes, in the order of their labels.
        vocab_size: The tokenizer's.
        max_length: Most tokens of a text, special ones included: the number of positions.
        dropout: All its dropout probabilities; None: 0.1, as ``BertConfig`` has it.
        class_weights: A weight for each class in the loss; None: 1.
        label_smoothing: In [0, 1).
        seed: Of the weights; the caller's generators are not touched.
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
    """Trains a tokenizer of at most ``vocab_size`` ids on the texts, the same on every machine.

    Width and case of letters are folded (NFKC, lowercase). All characters are ids, the most
    frequent ones if there are too many, of equals those of lower code points; then pairs are merged
    (BPE) within words, where a word is what stands between spaces: in Chinese all that stands
    between them. Text is always data: ``[CLS]`` inside a text never becomes the special id.

    Args:
        texts: Of the training examples only: those to be judged by must not be seen.
        vocab_size: Most ids, at least 5; fewer where the texts do not hold more.
        max_length: Most ids of a text, special ones included.

    Raises:
        DataError: No text holds a character.

    **Source:** Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", ACL
    2016.
    """
    special = list(_SPECIAL.values())
    engine = Tokenizer(models.BPE(unk_token=_SPECIAL["unk_token"]))
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    # A word is told from its like inside of another by the space before it.
    engine.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never")
    # The library settles ties at the cut by the order of a hash map; a character that it is given
    # counts as more frequent than any other.
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
    """The most frequent characters of normalized texts; equal counts by code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    if " " in counts:
        counts[_SPACE] += counts.pop(" ")
    return sorted(counts, key=lambda character: (-counts[character], character))[:limit]
