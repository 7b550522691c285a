"""Turns a corpus of text into two token files once, and later finds them in a cache.

::

    list files -> split -> tokenizer (loaded, cached, or trained on train only)
    -> each part: cached token file, or encode into the cache

A file is one document. Nothing is ever loaded whole: text passes in pieces that fit in memory and
join to exactly that text. It is always data: ``<|endoftext|>`` inside a document is encoded as
ordinary text and never becomes the end-of-text id, which stands between documents only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer as Engine, decoders, models, pre_tokenizers, trainers

from halfstep.errors import ConfigError, DataError
from halfstep.files import sync_folder
from halfstep.trainer.data.batches import TokenFile, held_out
from halfstep.trainer.data.config import DataConfig
from halfstep.trainer.data.records import (
    Source,
    content_sha256,
    decode,
    find_sources,
    inspect_file,
)

Item = TypeVar("Item")
Ids: TypeAlias = npt.NDArray[np.uint32]

PIECE_BYTES = 1 << 18
"""Size of a piece: a batch of several keeps all cores busy; one piece's tokens take some 10 MB."""
BATCH_CHARACTERS = 4 << 20
"""Amount of text encoded at once. The tokenizers library needs about 100 bytes per token, so 4 MiB
of text take some 150 MB of memory while they are encoded."""
SAMPLE_BYTES = 64 << 20
"""Limit of the text that a tokenizer is trained on, which bounds the memory; 8,192 merges need far
less."""
LINE_BYTES = 1 << 16
"""Distance from the exact position of a split within which a newline is sought."""


class TextPiece(NamedTuple):
    """A part of one document, never empty."""

    text: str
    begins: bool  # whether a document starts here


def read_pieces(sources: Iterable[Source], size: int = PIECE_BYTES) -> Iterator[TextPiece]:
    """Yields all documents in order, in pieces of at most ``size`` bytes, at least 4.

    Empty documents yield none. Where a cut falls depends on the text and the piece size alone, so
    the tokens of a file are the same on every machine.
    """
    for source in sources:
        begins, held, at = True, b"", source.start
        with open(source.path, "rb") as file:
            file.seek(at)
            while held := held + file.read(min(size + 1 - len(held), source.stop - file.tell())):
                cut = _cut(held, size) if len(held) > size else len(held)
                text = decode(held[:cut], str(source.path), at)
                text = text if at else text.removeprefix("\ufeff")  # the byte order mark
                held, at = held[cut:], at + cut
                if text:
                    yield TextPiece(text, begins)
                    begins = False


def _cut(data: bytes, stop: int) -> int:
    """Finds where a piece of at most ``stop`` bytes ends: 0 < cut <= stop < len(data).

    That is after its last newline, else before its last blank, else between two characters.
    """
    newline = data.rfind(b"\n", 0, stop)
    if newline >= 0:
        return newline + 1
    # Before the blank, not after it: GPT-2 style tokenizers join a blank to the word it precedes.
    blank = max(data.rfind(b" ", 0, stop), data.rfind(b"\t", 0, stop))
    return blank if blank > 0 else character_start(data, stop)


def character_start(data: bytes, index: int) -> int:
    """Moves an index back to the start of the UTF-8 character it falls into.

    ``index`` itself is returned where no start lies within 3 bytes, which is not UTF-8.
    """
    starts = (at for at in range(index, max(index - 4, -1), -1) if data[at] & 0xC0 != 0x80)
    return next(starts, index)


def split_corpus(
    sources: tuple[Source, ...], fraction: float
) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    """Cuts a corpus of whole files near its last ``fraction`` of bytes, in document order.

    The file in which the place falls is cut too: at the next newline, else between two characters.
    The two parts together hold every byte once, in order.
    """
    total = sum(source.size for source in sources)
    place = total - held_out(total, fraction)
    index = 0
    while place >= sources[index].size:
        place -= sources[index].size
        index += 1
    source = sources[index]
    if place:
        low = max(place - 4, 0)
        with open(source.path, "rb") as file:
            file.seek(low)
            data = file.read(place - low + LINE_BYTES)
        line = data.find(b"\n", place - low - 1) + 1
        inside = 0 < line < source.size - low
        place = low + (line if inside else character_start(data, place - low))
    # A cut at the border of a file leaves an empty span on one side of it.
    parts = (
        (*sources[:index], replace(source, stop=place)),
        (replace(source, start=place), *sources[index + 1 :]),
    )
    train, validation = (tuple(s for s in part if s.size) for part in parts)
    if not train or not validation:
        raise DataError(
            f"{sources[0].path}: {total} bytes in too few documents to hold some out for "
            f"validation; add text or give data.validation"
        )
    return train, validation


def encode_pieces(pieces: Iterable[TextPiece], tokenizer: Tokenizer) -> Iterator[tuple[Ids, int]]:
    """Encodes documents batch by batch, with a separator between two of them.

    The tokenizer's end-of-text id, else its ids of a newline, are the separator. Yields ids, and
    the UTF-8 bytes that they stand for.
    """
    end = tokenizer.end_of_text
    ids = tokenizer.encode("\n") if end is None else [end]
    separator, separator_bytes = np.array(ids, dtype=np.uint32), 1 if end is None else 0
    first = True
    for batch in in_batches(pieces, lambda piece: len(piece.text)):
        parts: list[Ids] = []
        text_bytes = 0
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        for piece, ids_of_piece in zip(batch, encoded, strict=True):
            if piece.begins and not first:
                parts.append(separator)
                text_bytes += separator_bytes
            first = False
            parts.append(ids_of_piece)
            text_bytes += len(piece.text.encode())
        yield np.concatenate(parts), text_bytes


def in_batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Groups items until their sizes reach ``BATCH_CHARACTERS``."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= BATCH_CHARACTERS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
)
"""Folders of tests (many are deliberately not UTF-8), of installed packages, and of wheels."""


def standard_library() -> tuple[Source, ...]:
    """Lists the ``.py`` files of the standard library, a corpus that every user already has.

    They are sorted by the SHA-256 of their relative paths, which is a fixed order and makes the
    tail that becomes validation a fair sample of the library, not its letters x to z. Empty files
    and those that are not UTF-8 are left out.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    ranked = {
        hashlib.sha256(name.as_posix().encode("utf-8", "surrogateescape")).digest(): folder / name
        for name in (path.relative_to(folder) for path in folder.rglob("*.py"))
        if not SKIPPED_FOLDERS.intersection(name.parts[:-1])
    }
    sources = []
    for _, path in sorted(ranked.items()):
        with suppress(UnicodeDecodeError):
            if path.read_bytes().decode():
                sources.append(inspect_file(path))
    if not sources:
        raise DataError(f"{folder}: no standard library as .py files; name text by --data")
    return tuple(sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """The data as training needs it: two token files and the tokenizer."""

    train: TokenFile
    validation: TokenFile
    tokenizer: Tokenizer


def prepare(config: DataConfig) -> PreparedData:
    """Finds or makes the token files that a configuration asks for.

    Documents are separated by the tokenizer's end-of-text id, or by one newline if it has none.
    Calls with the same content find the same files by its hash, whatever the paths are; several
    processes may call this at once.
    """
    train = find_sources(config.train) if config.train else standard_library()
    validation = find_sources(config.validation)
    known = {source.path.resolve() for source in train}
    for source in validation:
        if source.path.resolve() in known:
            raise DataError(
                f"{source.path}: is in both data.train and data.validation, so the validation loss "
                f"would say nothing; take it out of one of them"
            )
    if not validation:
        train, validation = split_corpus(train, config.validation_fraction)
    tokenizer = _tokenizer(config.tokenizer, train)
    return PreparedData(
        train=token_file(train, tokenizer),
        validation=token_file(validation, tokenizer),
        tokenizer=tokenizer,
    )


def _tokenizer(spec: str, sources: tuple[Source, ...]) -> Tokenizer:
    if not (asked := re.fullmatch(r"bpe:([0-9]{1,9})", spec)):
        return ByteTokenizer() if spec == "bytes" else load_tokenizer(spec)
    size = int(asked[1])
    total = sum(source.size for source in sources)
    every = -(-total // SAMPLE_BYTES)

    def build(folder: Path) -> None:
        texts = (piece.text for piece in islice(read_pieces(sources), 0, None, every))
        train_bpe(texts, size).save(folder)

    def load(folder: Path) -> Tokenizer | None:
        with suppress(DataError):
            return load_tokenizer(folder)
        return None

    return _cached("tokenizers", ["bpe", size, every, MIN_FREQUENCY], sources, load, build)


def token_file(sources: tuple[Source, ...], tokenizer: Tokenizer) -> TokenFile:
    """Finds or makes the token file of a text."""

    def build(folder: Path) -> None:
        stream = encode_pieces(read_pieces(sources), tokenizer)
        if write_tokens(folder, stream, vocab_size=tokenizer.vocab_size) == 0:
            raise DataError(f"{sources[0].path}: there is no text here, only empty documents")

    return _cached("tokens", ["tokens", tokenizer.fingerprint], sources, load_tokens, build)


# The cache. A folder in it is there whole, or not at all: it is built beside its final place,
# synced and renamed in one step. A killed process leaves only a temporary folder, ``.tmp-*``.


FORMAT_VERSION = 2
"""Part of every cache name; increase it when the same input would give different files."""
TOKENS_FILE, FACTS_FILE = "tokens.bin", "facts.json"
Result = TypeVar("Result")


def _cached(
    kind: str,
    made_with: list[object],
    sources: tuple[Source, ...],
    load: Callable[[Path], Result | None],
    build: Callable[[Path], None],
) -> Result:
    """Returns what is kept of these texts, building it first if it is absent or damaged.

    It is in $HALFSTEP_CACHE, else $XDG_CACHE_HOME/halfstep, else ~/.cache/halfstep; its name is
    made from everything that it depends on. Of several processes that build it at once, each gets
    the one that was renamed first. ``load`` returns None for what is absent or damaged; ``build``
    writes into an empty folder.
    """
    content = content_sha256(sources)
    text = json.dumps([FORMAT_VERSION, *made_with, content])
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(os.environ.get("HALFSTEP_CACHE") or f"{base}/halfstep").expanduser()
    root = cache / kind
    final = root / hashlib.sha256(text.encode()).hexdigest()
    found = load(final)
    if found is not None:
        return found
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=root) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        build(new)
        if content_sha256(sources) != content:  # or it would have a wrong name for ever
            names = ", ".join(str(source.path) for source in sources)
            raise DataError(f"{names:.200}: changed while it was read; run again when it rests")
        sync_folder(new)
        try:
            os.rename(new, final)
        except OSError:  # something is there
            if load(final) is None:  # damaged; otherwise another process was first
                shutil.rmtree(final)
                os.rename(new, final)
    found = load(final)
    if found is None:
        raise DataError(f"{final}: damaged as soon as it was written; check the disk")
    return found


def write_tokens(folder: Path, stream: Iterable[tuple[Ids, int]], *, vocab_size: int) -> int:
    """Writes tokens, each below ``vocab_size``, and the facts about them into an empty folder.

    ``stream`` yields ids and the UTF-8 bytes of the text that they stand for.

    Returns:
        How many tokens there are.
    """
    # the smallest type that holds every id
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    digest = hashlib.sha256()
    count = text_bytes = 0
    with open(folder / TOKENS_FILE, "wb") as file:
        for ids, encoded in stream:
            raw = ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
            file.write(raw)
            digest.update(raw)
            count += len(ids)
            text_bytes += encoded
    sha256 = digest.hexdigest()
    facts = {"dtype": dtype, "count": count, "text_bytes": text_bytes, "sha256": sha256}
    (folder / FACTS_FILE).write_text(json.dumps(facts), encoding="utf-8")
    return count


def load_tokens(folder: Path) -> TokenFile | None:
    """Opens what ``write_tokens`` wrote; None if it is absent or cut short."""
    try:
        facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        found = TokenFile(path=folder / TOKENS_FILE, **facts)
        size = found.path.stat().st_size
    except (OSError, ValueError, TypeError):
        return None
    return found if size == found.count * found.stored.itemsize else None


# Tokenizers, trained here or loaded from local files.


TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
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

    It is a byte-level BPE without merges, and has no end-of-text id.
    """

    def __init__(self) -> None:
        # The letter of each byte: printable Latin-1 stands for itself, the other 68 bytes take the
        # letters from U+0100 on. Source: bytes_to_unicode of GPT-2's encoder.py.
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        others = (letter for letter in letters if ord(letter) > 255)
        ids = {chr(b) if chr(b) in letters else next(others): b for b in range(256)}
        super().__init__(byte_level(models.BPE(vocab=ids, merges=[])), None)
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
            f"data.tokenizer asks for bpe:{vocab_size}; the bytes and the repeated pairs of this "
            f"text give {tokenizer.vocab_size} ids: use --tokenizer bytes or "
            f"bpe:{tokenizer.vocab_size}, or more text"
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
