"""Tokenizers turn text into ids and back; halfstep has two kinds of them.

Text is always data: ``<|endoftext|>`` inside a document is encoded letter by letter and never
becomes the end-of-text id, which only ``prepare`` writes, between documents.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer as Engine, decoders, models, pre_tokenizers

from halfstep.errors import DataError

Ids: TypeAlias = npt.NDArray[np.uint32]

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
BYTES_MARK, BYTES = "halfstep_tokenizer", "bytes"
"""Key and value in the config file of a saved ``ByteTokenizer``."""
END_OF_TEXT = "<|endoftext|>"
"""GPT-2's end-of-text token. **Source:** Radford et al. 2019, released ``encoder.json``."""


class Tokenizer(ABC):
    """What the rest of halfstep needs to know of a tokenizer.

    Attributes:
        vocab_size: One more than the largest id.
        fingerprint: SHA-256 (64 hexadecimal digits) of everything that decides which ids a text
            gets.
        end_of_text: The id that separates documents, if the tokenizer has one.
    """

    vocab_size: int
    fingerprint: str
    end_of_text: int | None

    @property
    @abstractmethod
    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """UTF-8 bytes each id stands for, shape (vocab_size,), 0 for special ids; None: unknown."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Turns texts into ids, without adding any special id.

        Raises:
            DataError: A text holds half a surrogate pair, which UTF-8 cannot hold.
        """

    def encode(self, text: str) -> list[int]:
        """Turns one text into ids."""
        return self.encode_batch([text])[0]

    def encode_arrays(self, texts: Sequence[str]) -> list[Ids]:
        """Turns texts into arrays of ids."""
        return [np.array(ids, dtype=np.uint32) for ids in self.encode_batch(texts)]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Turns ids into text; bytes that are not UTF-8 become U+FFFD, special ids their names."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the files that ``load_tokenizer`` and transformers' ``AutoTokenizer`` read."""


class ByteTokenizer(Tokenizer):
    """One id for each of the 256 bytes of UTF-8: lossless on every text and needs no training.

    It has no end-of-text id; documents are separated by a newline.
    """

    vocab_size = 256
    fingerprint = hashlib.sha256(b"halfstep byte tokenizer: id = byte").hexdigest()
    end_of_text: int | None = None

    @property
    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """Every id is one byte."""
        return np.ones(self.vocab_size, dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Turns texts into their UTF-8 bytes."""
        return [list(_utf8(text)) for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> list[Ids]:
        """Turns texts into arrays of their UTF-8 bytes."""
        return [np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Turns bytes into text; what is not UTF-8 becomes U+FFFD.

        Raises:
            DataError: An id is not a byte.
        """
        try:
            return bytes(ids).decode("utf-8", errors="replace")
        except ValueError:
            bad = next(index for index in ids if not 0 <= index < self.vocab_size)
            raise DataError(
                f"id {bad} is not a byte; the byte tokenizer has ids 0 to 255"
            ) from None

    def save(self, folder: Path) -> None:
        """Writes a byte-level BPE without merges, whose ids are the bytes, marked as ours."""
        alphabet = {letter: byte for byte, letter in enumerate(byte_letters())}
        engine = byte_level(models.BPE(vocab=alphabet, merges=[]))
        _write(folder, engine, {BYTES_MARK: BYTES})


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` library, made to treat every text as plain text.

    For byte-level BPE (GPT-2 and most of its descendants) decode(encode(text)) == text. Other kinds
    may normalise text. Their special tokens are encoded as plain text too, except by models that
    hold their spelling as an ordinary piece (some Unigram files): the library offers no way out.
    """

    def __init__(self, engine: Engine, end_of_text: str | None) -> None:
        """Takes over ``engine`` (and changes it: no padding, no truncation, no special tokens).

        Args:
            engine: The tokenizer of the library.
            end_of_text: Spelling of the token that separates documents, if there is one.

        Raises:
            DataError: The tokenizer encodes at random (BPE dropout) or has no ids.
        """
        engine.no_padding()
        engine.no_truncation()
        engine.encode_special_tokens = True
        if end_of_text is not None:
            # A file may list it as a plain added token; only special ones are kept out of text.
            engine.add_special_tokens([AddedToken(end_of_text, special=True, normalized=False)])
        if getattr(engine.model, "dropout", None):
            raise DataError(
                f"the tokenizer has BPE dropout {engine.model.dropout}, so the same text gets "
                f'other ids each time; set "dropout" to null in its {TOKENIZER_FILE}'
            )
        ids = engine.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise DataError("the tokenizer has an empty vocabulary; give a trained one")
        self._engine = engine
        self._end_of_text = end_of_text
        # The largest id decides, not the count: files with gaps between their ids exist.
        self.vocab_size = max(ids) + 1
        self.end_of_text = None if end_of_text is None else engine.token_to_id(end_of_text)
        definition = json.dumps([engine.to_str(), self.end_of_text])
        self.fingerprint = hashlib.sha256(definition.encode()).hexdigest()

    def __reduce__(self) -> tuple[type[LibraryTokenizer], tuple[Engine, str | None]]:
        # The library forgets encode_special_tokens when it is pickled; __init__ sets it again.
        return LibraryTokenizer, (self._engine, self._end_of_text)

    @property
    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """UTF-8 bytes each id stands for, ``(vocab_size,)``, 0 for special ids; None: unknown.

        Known for byte-level vocabularies, where each letter of a token is one byte.
        """
        decoder = json.loads(self._engine.to_str())["decoder"]
        if decoder is None or decoder["type"] != "ByteLevel":
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self._engine.get_vocab(with_added_tokens=False).items():
            lengths[index] = len(token)
        for index, added in self._engine.get_added_tokens_decoder().items():
            lengths[index] = 0 if added.special else len(added.content.encode("utf-8"))
        return lengths

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Turns texts into ids on all cores."""
        try:
            encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            for text in texts:
                _utf8(text)  # says which character the library could not take
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Turns ids into text; special ids become their names."""
        return self._engine.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and a tokenizer_config.json that names the end-of-text token."""
        names = {} if self._end_of_text is None else {"eos_token": self._end_of_text}
        _write(folder, self._engine, names)


def byte_level(model: models.Model) -> Engine:
    """Puts GPT-2's byte-level pre-tokenizer and decoder around a model, without a prefix space."""
    engine = Engine(model)
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return engine


def byte_letters() -> list[str]:
    """Lists the letter that byte-level BPE writes for each byte, in byte order.

    Printable Latin-1 stands for itself, the other 68 bytes take the letters from U+0100 on.

    **Source:** ``bytes_to_unicode`` of GPT-2's ``encoder.py`` (Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)
    ]


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text holds half a surrogate pair (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}, which UTF-8 cannot hold; remove it"
        ) from None


def _write(folder: Path, engine: Engine, config: dict[str, str]) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER_FILE).write_text(engine.to_str(pretty=True), encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
