import hashlib
import os
import shutil
import sysconfig

import numpy as np
import pytest

from halfstep.errors import DataError
from halfstep.trainer.data import corpus
from halfstep.trainer.data.config import DataConfig
from halfstep.trainer.data.corpus import (
    ByteTokenizer,
    load_tokens,
    prepare,
    standard_library,
    token_file,
    write_tokens,
)
from halfstep.trainer.data.records import find_sources

LINES = "".join(f"line {a}{b}{c} text\n" for a in "abcde" for b in "fghij" for c in "klmno")


@pytest.fixture
def run():
    """Prepares."""

    def run(*train, tokenizer="bytes", validation=(), **fields):
        config = DataConfig(
            train=tuple(map(str, train)),
            tokenizer=str(tokenizer),
            validation=tuple(map(str, validation)),
            **fields,
        )
        return prepare(config)

    return run


def ids(file):
    """All tokens of a file."""
    return file.windows([0], file.count)[0]


def text_of(prepared, part):
    return prepared.tokenizer.decode(ids(getattr(prepared, part)).tolist())


def test_validation_files_leave_train_whole(run, write):
    last = write("a b\n\u732b/\u00e9.txt", "x\ny")
    prepared = run(write("a.txt", "one"), write("b.txt", "two"), validation=[last])
    assert text_of(prepared, "train") == "one\ntwo"
    assert text_of(prepared, "validation") == "x\ny"
    assert token_file(find_sources((str(last),)), ByteTokenizer()) == prepared.validation


def test_pieces_and_batches_do_not_show(run, write, monkeypatch):
    path = write("a.txt", LINES + "\u00e9" * 500 + " word" * 100)
    plain = run(path)
    shutil.rmtree(plain.train.path.parents[2])
    monkeypatch.setattr(corpus.read_pieces, "__defaults__", (16,))
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", 50)
    again = run(path)
    assert again.train.sha256 == plain.train.sha256
    assert again.validation.sha256 == plain.validation.sha256


def test_the_tokenizer_sees_only_train(run, write):
    train, secret = LINES, "zqxj " * 200
    alone = run(write("a.txt", train), tokenizer="bpe:290", validation=[write("b.txt", "b")])
    other = run(write("a.txt", train), tokenizer="bpe:290", validation=[write("b.txt", secret)])
    assert alone.tokenizer.fingerprint == other.tokenizer.fingerprint
    split = run(write("c.txt", train + secret), tokenizer="bpe:290", validation_fraction=0.4)
    assert len(split.tokenizer.encode("zqxj")) == 4


def test_a_tokenizer_is_trained_on_every_so_many_pieces_of_much_text(run, write, monkeypatch):
    paths = [write(f"{n}.md", f"{'ab' if n % 3 == 0 else 'cd'} " * 9) for n in range(99)]
    monkeypatch.setattr(corpus, "SAMPLE_BYTES", 27 * 33 + 1)
    found = run(*paths, tokenizer="bpe:258", validation=[write("b.txt", "b")]).tokenizer
    assert (len(found.encode("ab")), len(found.encode("cd"))) == (1, 2)


def test_a_second_call_finds_it_all(run, write):
    path = write("a.txt", LINES)
    first = run(path, tokenizer="bpe:290")
    before = first.train.path.stat()
    second = run(path, tokenizer="bpe:290")
    assert (second.train, second.validation) == (first.train, first.validation)
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert first.train.path.stat() == before
    first.tokenizer.save(path.parent / "saved")
    assert run(path, tokenizer=path.parent / "saved").train == first.train


def test_the_cache_follows_content_not_names(run, write, monkeypatch):
    first = run(write("a.txt", LINES))
    assert run(write("elsewhere/b.txt", LINES)).train == first.train
    assert run(write("a.txt", "!" + LINES)).train.path != first.train.path
    assert run(write("a.txt", LINES), validation_fraction=0.2).train.path != first.train.path
    split_bpe = run(write("a.txt", LINES), tokenizer="bpe:290")
    assert split_bpe.train.path != first.train.path
    whole_bpe = run(write("a.txt", LINES), tokenizer="bpe:290", validation=[write("v.txt", "v")])
    assert split_bpe.train.sha256 != whole_bpe.train.sha256


def test_the_same_file_in_both_parts_is_refused(run, write, tmp_path):
    path = write("f/a.txt", LINES)
    (tmp_path / "link.txt").symlink_to(path)
    for train, validation in ((path.parent, path), (path, tmp_path / "link.txt")):
        with pytest.raises(DataError, match=r"is in both data\.train and data\.validation"):
            run(train, validation=[validation])


def test_files_without_any_text_are_refused(run, write):
    path = write("a.txt", "\ufeff")
    with pytest.raises(DataError, match=r"a\.txt: there is no text here"):
        run(write("b.txt", LINES), validation=[path])


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:290"])
def test_a_bad_byte_is_named_and_leaves_nothing(run, write, tmp_path, tokenizer):
    path = write("a.txt", LINES.encode() + b"\xff" + LINES.encode() * 9)
    with pytest.raises(DataError, match=rf"a\.txt: not UTF-8: .* offset {len(LINES)};"):
        run(path, tokenizer=tokenizer)
    assert [name for _, _, files in os.walk(tmp_path / "cache") for name in files] == []


@pytest.fixture
def meanwhile(monkeypatch):
    """Does something before tokens are written."""
    real = corpus.write_tokens

    def plant(act):
        def write(*arguments, **options):
            act()
            return real(*arguments, **options)

        monkeypatch.setattr(corpus, "write_tokens", write)

    return plant


def test_text_that_changes_while_it_is_encoded_is_not_kept(run, write, tmp_path, meanwhile):
    path = write("a.txt", LINES)
    meanwhile(lambda: path.write_text(LINES.upper()))
    with pytest.raises(DataError, match=r"a\.txt: changed while it was read"):
        run(path)
    assert os.listdir(tmp_path / "cache" / "tokens") == []


def relative_names(folder):
    return [source.path.relative_to(folder).as_posix() for source in standard_library()]


def test_without_train_its_the_standard_library(run, write, tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    with pytest.raises(DataError, match=r"lib: no standard library .* --data"):
        run()
    for name in ("a.py", "b/c.py", "json/d.py", "z.py"):
        write(f"lib/{name}", LINES)
    for skipped in ("test", "json/tests", "site-packages", "b/__pycache__", "ensurepip/_bundled"):
        write(f"lib/{skipped}/x.py", "no")
    write("lib/readme.txt", "no")
    write("lib/empty.py", "")
    write("lib/latin1.py", b"# \xe9\n")
    listed = relative_names(tmp_path / "lib")
    assert sorted(listed) == ["a.py", "b/c.py", "json/d.py", "z.py"]
    assert listed == sorted(listed, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert listed != sorted(listed)  # or this test could not tell
    prepared = run()
    assert text_of(prepared, "train") + text_of(prepared, "validation") == "\n".join([LINES] * 4)


# The cache, and token files.


def test_a_damaged_result_is_replaced_and_of_two_that_finish_at_once_the_first_stays(
    run, write, meanwhile
):
    path = write("a.txt", LINES)
    found = run(path).train
    folder = found.path.parent
    found.path.write_bytes(b"")
    assert run(path).train == found
    assert found.path.stat().st_size == 2 * found.count

    def other():  # another process, while this one encodes
        if not times:
            times.append(0)
            run(path)
            times.append(found.path.stat().st_ino)

    shutil.rmtree(folder)
    times = []
    meanwhile(other)
    assert run(path).train == found
    assert times == [0, found.path.stat().st_ino]
    assert len(os.listdir(folder.parent)) == 2  # train and validation


IDS = np.array([0, 1, 255, 256, 65_535, 7, 7], dtype=np.uint32)


def make(folder, *parts, vocab_size=65_536):
    folder.mkdir(exist_ok=True)
    count = write_tokens(folder, [(p, 2 * len(p)) for p in parts], vocab_size=vocab_size)
    assert count == sum(map(len, parts))
    return load_tokens(folder)


@pytest.mark.parametrize(("vocab_size", "kind"), [(65_536, "<u2"), (65_537, "<u4")])
def test_tokens_come_back_as_written_little_endian(tmp_path, vocab_size, kind):
    found = make(tmp_path / "t", IDS[:3], IDS[3:], vocab_size=vocab_size)
    raw = IDS.astype(kind).tobytes()
    assert found.path.read_bytes() == raw
    assert found.sha256 == hashlib.sha256(raw).hexdigest()
    assert found.windows([0], 7)[0].tolist() == IDS.tolist()
    assert (found.count, found.text_bytes) == (7, 14)
    assert found.dtype == {"<u2": "uint16", "<u4": "uint32"}[kind]


def test_a_file_that_was_cut_while_it_is_in_use_gives_no_zeros(tmp_path):
    found = make(tmp_path / "t", IDS)
    os.truncate(found.path, 8)
    assert found.windows([0], 4).tolist() == [IDS[:4].tolist()]
    for start in (0, 3, 4):
        with pytest.raises(DataError, match=r"tokens\.bin: was cut"):
            found.windows([start], 5)
