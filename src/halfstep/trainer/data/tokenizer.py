"""Tokenizers that turn text into ids and back, trained here or loaded from local files.

Text is always data: ``<|endoftext|>`` inside a document is encoded as ordinary text and never
becomes the end-of-text id, which only ``prepare`` writes, between documents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer as Engine, decoders, models, pre_tokenizers, trainers

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.token_file import Ids

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
BYTES_MARK, BYTES = "halfstep_tokenizer", "bytes"
"""Key and value in the config file of a saved ``ByteTokenizer``."""
END_OF_TEXT = "<|endoftext|>"
"""GPT-2's end-of-text token. **Source:** Radford et al. 2019, released ``encoder.json``."""
MIN_FREQUENCY = 2
"""A pair is merged only if it occurs this often, as a pair seen once tells nothing."""


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library, made to treat every text as plain text.

    For byte-level BPE (GPT-2 and most of its descendants) decode(encode(text)) == text. Other kinds
    may normalise text. Their special tokens are encoded as plain text too, except by models whose
    vocabulary has them as ordinary pieces (some Unigram files): the library cannot prevent that.

    Attributes:
        vocab_size: One more than the largest id.
        fingerprint: SHA-256 (64 hexadecimal digits) of everything that decides which ids a text
            gets.
        end_of_text: The id that separates documents, if the tokenizer has one.
    """

    def __init__(self, engine: Engine, end_of_text: str | None) -> None:
        """Wraps ``engine``, and changes it: no padding, no truncation, no special tokens in text.

        ``end_of_text`` is the spelling of the token that separates documents, if there is one.
        """
        engine.no_padding()
        engine.no_truncation()
        engine.encode_special_tokens = True
        if end_of_text is not None:
            # A file may list it as a plain added token; only special ones are kept out of text.
            engine.add_special_tokens([AddedToken(end_of_text, special=True, normalized=False)])
        if getattr(engine.model, "dropout", None):
            engine.model.dropout = None  # it gives the same text other ids each time
        self._engine = engine
        self._config = {} if end_of_text is None else {"eos_token": end_of_text}
        # The largest id decides, not the count: files with gaps between their ids exist.
        self.vocab_size = 1 + max(engine.get_vocab(with_added_tokens=True).values(), default=-1)
        self.end_of_text = None if end_of_text is None else engine.token_to_id(end_of_text)
        definition = json.dumps([engine.to_str(), self.end_of_text])
        self.fingerprint = hashlib.sha256(definition.encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Turns texts into arrays of ids on all cores, without adding any special id."""
        encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        """Turns one text into ids."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turns ids into text; bytes that are not UTF-8 become U+FFFD, special ids their names."""
        return self._engine.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Writes the files that ``load_tokenizer`` and transformers' ``AutoTokenizer`` read."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config}
        folder.mkdir(parents=True, exist_ok=True)
        text = self._engine.to_str(pretty=True)
        (folder / TOKENIZER_FILE).write_text(text, encoding="utf-8")
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class ByteTokenizer(Tokenizer):
    """One id for each of the 256 bytes of UTF-8: lossless on every text and needs no training.

    It has no end-of-text id; documents are separated by a newline.
    """

    def __init__(self) -> None:
        """Makes a byte-level BPE without merges, so that the ids are the bytes."""
        alphabet = {letter: byte for byte, letter in enumerate(byte_letters())}
        super().__init__(byte_level(models.BPE(vocab=alphabet, merges=[])), None)
        self._config = {BYTES_MARK: BYTES}
        self.fingerprint = hashlib.sha256(b"halfstep byte tokenizer: id = byte").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Turns texts into arrays of their UTF-8 bytes, which takes no search for merges."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]


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
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = (letter for letter in letters if ord(letter) > 255)
    return [chr(byte) if chr(byte) in letters else next(others) for byte in range(256)]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE of exactly ``vocab_size`` ids, at least 257, on texts.

    Id 0 is ``<|endoftext|>``, ids 1 to 256 are the bytes, the rest are merges in order of training.

    Raises:
        ConfigError: The text does not hold enough repeated pairs: the vocabulary's size determines
            the model's shape and must not change silently.

    **Source:** Sennrich et al. 2016 (BPE); Radford et al. 2019 (on bytes, with GPT-2's pre-tokens).
    """
    engine = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer=trainer)
    tokenizer = Tokenizer(engine, END_OF_TEXT)
    if tokenizer.vocab_size != vocab_size:
        raise ConfigError(
            f"data.tokenizer asks for bpe:{vocab_size}, but this text has repeated pairs for only "
            f"{tokenizer.vocab_size} ids; use --tokenizer bytes or bpe:{tokenizer.vocab_size}, or "
            "more text"
        )
    return tokenizer


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Loads a tokenizer from a ``tokenizer.json``, or from a folder that holds one.

    The end-of-text token is ``eos_token`` of a ``tokenizer_config.json`` in the same folder, else
    ``<|endoftext|>`` where the vocabulary has it, else there is none.
    """
    path = Path(path).expanduser()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        beside = file.with_name(CONFIG_FILE)
        config = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
        if config.get(BYTES_MARK) == BYTES:
            return ByteTokenizer()
        engine = Engine.from_str(file.read_text(encoding="utf-8"))
    # The library raises bare Exception for whatever is wrong with a file.
    except Exception as error:
        raise DataError(
            f"tokenizer {path}: cannot be used ({error}); give bytes, bpe:N, a {TOKENIZER_FILE}, "
            f"or a local folder that holds one (halfstep downloads none)"
        ) from None
    end = config.get("eos_token") or END_OF_TEXT
    end = end["content"] if isinstance(end, dict) else end  # an AddedToken written out
    return Tokenizer(engine, end if engine.token_to_id(end) is not None else None)
