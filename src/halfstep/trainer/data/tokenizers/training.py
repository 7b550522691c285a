"""A byte-level BPE is trained on the corpus itself, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenizers import models, pre_tokenizers, trainers

from halfstep.errors import ConfigError
from halfstep.trainer.data.corpus.documents import Piece
from halfstep.trainer.data.progress import TRAIN_TOKENIZER, Progress, no_progress
from halfstep.trainer.data.tokenizers.tokenizer import END_OF_TEXT, LibraryTokenizer, byte_level

SAMPLE_BYTES = 64 << 20
"""Most text that training looks at: far more than 8,192 merges need, and it bounds the memory."""

MIN_FREQUENCY = 2
"""A pair is merged only if it occurs this often: a pair seen once says nothing about the text."""


def train_bpe(
    pieces: Iterable[Piece],
    vocab_size: int,
    *,
    total_bytes: int,
    progress: Progress = no_progress,
) -> LibraryTokenizer:
    """Trains a byte-level BPE of exactly ``vocab_size`` ids on an even sample of the text.

    Id 0 is ``<|endoftext|>``, ids 1 to 256 are the bytes, the rest are merges in order of training.
    A corpus with too few repeated pairs is refused, not answered with fewer ids: the size of the
    vocabulary decides the shape of the model, and nothing asked for is downgraded in silence.

    Args:
        pieces: The text, read once.
        vocab_size: Number of ids, at least 257.
        total_bytes: Bytes of input that ``pieces`` uses up in all.
        progress: Told after each piece.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: The text does not hold enough repeated pairs.
        DataError: The text cannot be read.

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
    engine.train_from_iterator(_sample(pieces, total_bytes, progress), trainer=trainer)
    tokenizer = LibraryTokenizer(engine, END_OF_TEXT)
    if tokenizer.vocab_size != vocab_size:
        raise ConfigError(
            f"data.tokenizer asks for bpe:{vocab_size}, but this text has repeated pairs for only "
            f"{tokenizer.vocab_size} ids; use bpe:{tokenizer.vocab_size}, bytes, or more text"
        )
    return tokenizer


def _sample(pieces: Iterable[Piece], total: int, progress: Progress) -> Iterator[str]:
    """Yields evenly spread pieces of at most ``SAMPLE_BYTES`` together.

    ``credit`` grows with every byte read, at the rate SAMPLE_BYTES / total; a piece is taken when
    there is credit for all of it (Bresenham's line, in bytes). No piece is longer than the input it
    uses up, so a corpus within the limit is taken whole.
    """
    done, credit = 0, 0
    for piece in pieces:
        done += piece.source_bytes
        credit += piece.source_bytes * SAMPLE_BYTES
        if credit >= piece.text_bytes * total:
            credit -= piece.text_bytes * total
            yield piece.text
        progress(TRAIN_TOKENIZER, done, total)
