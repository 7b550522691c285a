"""Tokenizer of a classifier from scratch: characters and frequent strings of the training texts.

Text is always data: ``[CLS]`` inside a text is encoded letter by letter and never becomes the id.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine, models, normalizers, pre_tokenizers, trainers

from halfstep.errors import DataError
from halfstep.trainer.data.tokenizers.tokenizer import CONFIG_FILE, TOKENIZER_FILE

PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
"""BERT's names, ids 0 to 3. No text can hold them: it is lowercased first."""

KIND_MARK, KIND = "halfstep_tokenizer", "text"
"""Key and value in the settings of a saved :class:`TextTokenizer`."""

SPACE = "▁"
"""What the library writes for a space, so that it stays a part of the word after it."""

MIN_FREQUENCY = 2
"""A pair is merged only if it occurs this often."""

SAMPLE_CHARACTERS = 16 << 20
"""Most text that training looks at: far more than some thousand merges need."""


class TextTokenizer:
    """Ids of a text between ``[CLS]`` and ``[SEP]``, cut to a greatest length.

    Attributes:
        pad_id: Fills rows of a batch.
        vocab_size: Number of ids.
        max_length: Most ids of a text, both special ones included.
        fingerprint: SHA-256 (64 hexadecimal digits) of everything that decides ids.
        truncated: How many of the texts encoded so far were cut.
    """

    def __init__(self, engine: Engine, max_length: int) -> None:
        """Takes over ``engine``, and changes it: special tokens in texts are letters.

        Raises:
            DataError: The engine lacks a special token, or ``max_length`` leaves no room for text.
        """
        if not isinstance(max_length, int) or isinstance(max_length, bool) or max_length < 3:
            raise DataError(f"max_length must be an integer from 3, got {max_length!r}")
        special = [engine.token_to_id(name) for name in (PAD, UNKNOWN, START, END)]
        if special != [0, 1, 2, 3]:
            raise DataError(f"{PAD}, {UNKNOWN}, {START}, {END} must be ids 0 to 3, got {special}")
        engine.no_padding()
        engine.no_truncation()
        engine.encode_special_tokens = True
        self._engine = engine
        self.pad_id, self._start, self._end = 0, 2, 3
        self.vocab_size = max(engine.get_vocab(with_added_tokens=True).values()) + 1
        self.max_length = max_length
        definition = json.dumps([engine.to_str(), max_length])
        self.fingerprint = hashlib.sha256(definition.encode()).hexdigest()
        self.truncated = 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Turns each text into ids: ``[CLS]``, the text's, ``[SEP]``; on all cores.

        Raises:
            DataError: A text holds half a surrogate pair, which UTF-8 cannot hold.
        """
        try:
            encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            for text in texts:
                _check_utf8(text)  # says which character the library could not take
            raise
        room = self.max_length - 2
        found = [encoding.ids for encoding in encodings]
        self.truncated += sum(len(ids) > room for ids in found)
        return [[self._start, *ids[:room], self._end] for ids in found]

    def save(self, folder: Path) -> None:
        """Writes ``tokenizer.json`` and settings, which :func:`load_text_tokenizer` reads."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            KIND_MARK: KIND,
            "model_max_length": self.max_length,
            "pad_token": PAD,
            "unk_token": UNKNOWN,
            "cls_token": START,
            "sep_token": END,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKENIZER_FILE).write_text(self._engine.to_str(pretty=True), encoding="utf-8")
        (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def train_text_tokenizer(texts: Sequence[str], vocab_size: int, max_length: int) -> TextTokenizer:
    """Trains a tokenizer of at most ``vocab_size`` ids on the texts, the same on every machine.

    Width and case of letters are folded (NFKC, lowercase). All characters are ids, the most
    frequent ones if there are too many, of equals those of lower code points; then pairs are merged
    (BPE) within words, where a word is what stands between spaces: in Chinese all that stands
    between them.

    Args:
        texts: Of the training examples only: those to be judged by must not be seen.
        vocab_size: Most ids, at least 5; fewer where the texts do not hold more.
        max_length: Most ids of a text.

    Raises:
        DataError: A text holds half a surrogate pair, or none holds a character.

    **Source:** Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", ACL
    2016.
    """
    engine = Engine(models.BPE(unk_token=UNKNOWN))
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    # A word is told from its like inside of another by the space before it.
    engine.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never")
    special = [PAD, UNKNOWN, START, END]
    for text in texts:
        _check_utf8(text)
    sample = list(_sample(texts))
    # The library settles ties at the cut by the order of a hash map; a character that it is given
    # counts as more frequent than any other.
    alphabet = _most_frequent(sample, engine.normalizer, max(vocab_size - len(special), 1))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    engine.train_from_iterator(sample, trainer=trainer)
    if engine.get_vocab_size() <= len(special):
        raise DataError(
            f"no tokenizer can be trained: the {len(texts)} training texts hold no characters"
        )
    return TextTokenizer(engine, max_length)


def load_text_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer that :meth:`TextTokenizer.save` wrote, with the same fingerprint.

    Raises:
        DataError: A file is missing or damaged, or of another tokenizer.
    """
    settings_file, file = folder / CONFIG_FILE, folder / TOKENIZER_FILE
    settings = _settings(settings_file)
    if settings.get(KIND_MARK) != KIND:
        raise DataError(f"tokenizer {settings_file}: {KIND_MARK} is not {KIND!r}; it is another's")
    try:
        engine = Engine.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"tokenizer {file}: cannot be read: {error.strerror or error}") from None
    # The library raises bare Exception for whatever is wrong with a file.
    except Exception as error:
        raise DataError(f"tokenizer {file}: not a usable tokenizer ({error})") from None
    try:
        return TextTokenizer(engine, settings.get("model_max_length"))  # type: ignore[arg-type]
    except DataError as error:
        raise DataError(f"tokenizer {folder}: {error}") from None


def _settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"tokenizer {file}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DataError(f"tokenizer {file}: not readable JSON: {error}") from None
    if not isinstance(settings, dict):
        raise DataError(f"tokenizer {file}: must hold a JSON object, got {type(settings).__name__}")
    return settings


def _sample(texts: Sequence[str]) -> Iterator[str]:
    """Yields evenly spread texts of at most ``SAMPLE_CHARACTERS`` together."""
    total = sum(len(text) for text in texts)
    credit = 0
    for text in texts:
        credit += len(text) * SAMPLE_CHARACTERS
        if credit >= len(text) * total:
            credit -= len(text) * total
            yield text


def _most_frequent(texts: Sequence[str], normalizer: Any, limit: int) -> list[str]:
    """The most frequent characters of normalized texts; equal counts by code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    if " " in counts:
        counts[SPACE] += counts.pop(" ")
    return sorted(counts, key=lambda character: (-counts[character], character))[:limit]


def _check_utf8(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text holds half a surrogate pair (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}, which UTF-8 cannot hold; remove it"
        ) from None
