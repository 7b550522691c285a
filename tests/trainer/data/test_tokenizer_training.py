import itertools
import subprocess
import sys
from collections import Counter

import pytest

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.data.corpus.documents import Piece
from halfstep.trainer.data.tokenizers import training as tokenizer_training
from halfstep.trainer.data.tokenizers.tokenizer import byte_letters
from halfstep.trainer.data.tokenizers.training import train_bpe

WORDS = "".join(f"{a}{b}{c} " for a in "abcde" for b in "fghij" for c in "klmno") * 3


def pieces(*texts):
    return [Piece(text, len(text.encode()), len(text.encode()), True) for text in texts]


def train(size, *texts, **options):
    total = sum(len(text.encode()) for text in texts)
    return train_bpe(pieces(*texts), size, total_bytes=total, **options)


def reference_merges(words, number):
    """BPE from its definition: merge the commonest pair, again and again (Sennrich et al. 2016)."""
    counts = {tuple(word): count for word, count in Counter(words).items()}
    merges = []
    for _ in range(number):
        pairs = Counter()
        for word, count in counts.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: pairs[pair])
        merges.append("".join(best))
        merged = {}
        for word, count in counts.items():
            new, i = [], 0
            while i < len(word):
                if word[i : i + 2] == best:
                    new.append("".join(best))
                    i += 2
                else:
                    new.append(word[i])
                    i += 1
            merged[tuple(new)] = merged.get(tuple(new), 0) + count
        counts = merged
    return merges


def test_merges_are_those_of_the_definition():
    # Chosen so that no two pairs are ever equally common: the definition does not break ties.
    words = ["abcd"] * 9 + ["abce"] * 6 + ["xy"] * 4
    text = "\n".join(words)  # a newline is a word of its own for GPT-2's pre-tokenizer
    tokenizer = train(261, text)
    learned = [tokenizer.decode([number]) for number in range(257, 261)]
    assert sorted(learned[:2]) == sorted(reference_merges(words, 2))
    assert learned[2] == reference_merges(words, 3)[2]
    assert learned[3] == reference_merges(words, 4)[3]


def test_the_size_is_exact_and_the_first_ids_are_end_of_text_and_bytes():
    tokenizer = train(300, WORDS)
    assert tokenizer.vocab_size == 300
    assert tokenizer.end_of_text == 0
    assert sorted(tokenizer.token_bytes[1:257]) == [1] * 256
    assert len(set(tokenizer._engine.get_vocab())) == 300
    assert set(byte_letters()) <= set(tokenizer._engine.get_vocab())


def test_too_little_text_is_refused_with_the_size_that_works():
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer asks for bpe:500, .* use bpe:(\d+)"
    ) as e:
        train(500, "ab ab abc abc")
    possible = int(str(e.value).split("use bpe:")[1].split(",")[0])
    assert train(possible, "ab ab abc abc").vocab_size == possible
    with pytest.raises(ConfigError):
        train(possible + 1, "ab ab abc abc")


def test_a_look_alike_of_end_of_text_is_text_for_training_too():
    tokenizer = train(268, "<|endoftext|> " * 20)
    assert len(tokenizer.encode("endoftext")) < len("endoftext")  # it was merged, so it was seen
    assert tokenizer.end_of_text not in tokenizer.encode("<|endoftext|>")


def test_training_gives_the_same_tokenizer_in_every_process():
    code = (
        "from halfstep.trainer.data.corpus.documents import Piece\n"
        "from halfstep.trainer.data.tokenizers.training import train_bpe\n"
        f"print(train_bpe([Piece({WORDS!r}, 1, 1, True)], 320, total_bytes=9).fingerprint)"
    )
    prints = {train(320, WORDS).fingerprint}
    for threads in ("true", "false"):
        output = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path), "TOKENIZERS_PARALLELISM": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        prints.add(output.strip())
    assert len(prints) == 1


@pytest.mark.parametrize("limit", [50, 100, 333, 999, 5000])
def test_the_sample_is_even_and_within_its_limit(monkeypatch, limit):
    monkeypatch.setattr(tokenizer_training, "SAMPLE_BYTES", limit)
    texts = [f"{number:09d}\n" for number in range(100)]
    taken = list(tokenizer_training._sample(pieces(*texts), 1000, lambda *call: None))
    assert sum(map(len, taken)) == min(1000, limit // 10 * 10)
    numbers = [int(text) for text in taken]
    assert numbers == sorted(numbers)
    gaps = [b - a for a, b in itertools.pairwise(numbers)]
    # Evenly spread: no gap is more than one piece longer than another.
    assert max(gaps) - min(gaps) <= 1
    assert numbers[0] <= max(gaps)
    assert 100 - numbers[-1] <= max(gaps)


def test_a_sample_of_uneven_pieces_stays_within_its_limit(monkeypatch):
    monkeypatch.setattr(tokenizer_training, "SAMPLE_BYTES", 300)
    texts = ["x" * (1 + number * 7 % 90) for number in range(60)]
    total = sum(map(len, texts))
    taken = list(tokenizer_training._sample(pieces(*texts), total, lambda *call: None))
    assert 200 <= sum(map(len, taken)) <= 300


def test_progress_reaches_the_total():
    calls = []
    train(300, WORDS, WORDS, progress=lambda *call: calls.append(call))
    assert calls == [("train tokenizer", len(WORDS) * k, len(WORDS) * 2) for k in (1, 2)]


def test_an_error_in_the_text_comes_through():
    def broken():
        yield from pieces(WORDS)
        raise DataError("a.txt: not UTF-8")

    with pytest.raises(DataError, match=r"a\.txt: not UTF-8"):
        train_bpe(broken(), 300, total_bytes=2 * len(WORDS))
