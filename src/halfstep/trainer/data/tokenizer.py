"""Tokenizers that turn text into ids and back, trained here or loaded from local files.

Text is always data: ``<|endoftext|>`` inside a document is encoded as ordinary text and never
becomes the end-of-text id, which only ``prepare`` writes, between documents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer as Engine, decoders, models, pre_tokenizers, trainers

from halfstep.errors import ConfigError, DataError

Ids: TypeAlias = npt.NDArray[np.uint32]

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
"""The two files of GPT-2's own format."""
BYTES_MARK, BYTES = "halfstep_tokenizer", "bytes"
"""Key and value in the config file of a saved ``ByteTokenizer``."""
END_OF_TEXT = "<|endoftext|>"
"""GPT-2's end-of-text token. **Source:** Radford et al. 2019, released ``encoder.json``."""
KNOWN_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""Tried in this order where no config file names one: GPT-2, Llama 3, T5 and Llama 2, Gemma."""
MIN_FREQUENCY = 2
"""A pair is merged only if it occurs this often, as a pair seen once tells nothing."""
ACCEPTED = (
    f"give bytes, bpe:N, a {TOKENIZER_FILE}, or a local folder with {TOKENIZER_FILE} "
    f"or {VOCAB_FILE} and {MERGES_FILE} (halfstep downloads none)"
)


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

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[Engine, str | None]]:
        # The library forgets encode_special_tokens when it is pickled; __init__ sets it again.
        return Tokenizer, (self._engine, self._end_of_text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Turns texts into ids on all cores, without adding any special id."""
        try:
            encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise DataError(
                "the text holds half a surrogate pair, which UTF-8 cannot hold; remove it"
            ) from None
        return [encoding.ids for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        """Turns one text into ids."""
        return self.encode_batch([text])[0]

    def encode_arrays(self, texts: Sequence[str]) -> list[Ids]:
        """Turns texts into arrays of ids."""
        return [np.array(ids, dtype=np.uint32) for ids in self.encode_batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Turns ids into text; bytes that are not UTF-8 become U+FFFD, special ids their names."""
        return self._engine.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Writes the files that ``load_tokenizer`` and transformers' ``AutoTokenizer`` read."""
        self._write(folder, {} if self._end_of_text is None else {"eos_token": self._end_of_text})

    def _write(self, folder: Path, config: dict[str, str]) -> None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
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
        self.fingerprint = hashlib.sha256(b"halfstep byte tokenizer: id = byte").hexdigest()

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[()]]:  # type: ignore[override]
        return ByteTokenizer, ()

    def encode_arrays(self, texts: Sequence[str]) -> list[Ids]:
        """Turns texts into arrays of their UTF-8 bytes."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Turns bytes into text; what is not UTF-8 becomes U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Writes a tokenizer that gives other programs the same ids, marked as halfstep's own."""
        self._write(folder, {BYTES_MARK: BYTES})


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
    A corpus with too few repeated pairs is refused instead of giving fewer ids, because the
    vocabulary's size determines the model's shape and must not change silently.

    Raises:
        ConfigError: The text does not hold enough repeated pairs.

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
    """Loads a tokenizer from a ``tokenizer.json`` or from a Hugging Face or GPT-2 folder.

    The end-of-text token is ``eos_token`` of a ``tokenizer_config.json`` in the same folder, else
    the first of ``KNOWN_END_OF_TEXT`` in the vocabulary, else there is none. A tokenizer written by
    ``Tokenizer.save`` is loaded with the same fingerprint.

    Raises:
        DataError: If the path does not exist, or holds no usable tokenizer.
    """
    path = Path(path).expanduser()
    try:
        folder = path if path.is_dir() else path.parent
        file = folder / CONFIG_FILE
        config = dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
        if config.get(BYTES_MARK) == BYTES:
            return ByteTokenizer()
        engine = _engine(path)
        named = config.get("eos_token")
        if isinstance(named, dict):  # the older way: an AddedToken written out
            named = named.get("content")
        candidates = (named,) if isinstance(named, str) else KNOWN_END_OF_TEXT
        ends = (name for name in candidates if engine.token_to_id(name) is not None)
        return Tokenizer(engine, next(ends, None))
    except DataError as error:
        raise DataError(f"tokenizer {path}: {error}") from None
    except FileNotFoundError:
        raise DataError(f"tokenizer {path}: there is none; {ACCEPTED}") from None
    # The library raises bare Exception for whatever is wrong with a file.
    except Exception as error:
        raise DataError(f"tokenizer {path}: not a usable tokenizer ({error}); {ACCEPTED}") from None


def _engine(path: Path) -> Engine:
    vocab, merges = path / VOCAB_FILE, path / MERGES_FILE
    if vocab.is_file() and merges.is_file() and not (path / TOKENIZER_FILE).is_file():
        return byte_level(models.BPE.from_file(str(vocab), str(merges)))
    file = path / TOKENIZER_FILE if path.is_dir() else path
    return Engine.from_str(file.read_text(encoding="utf-8"))
