import hashlib
import os
import pickle
import resource

import numpy as np
import pytest

from halfstep.errors import DataError
from halfstep.trainer.data.token_file import Encoded, TokenFile, fetch, load_tokens, write_tokens

IDS = np.array([0, 1, 255, 256, 65_535, 7, 7], dtype=np.uint32)


def stream(*parts):
    return [Encoded(part, 2 * len(part)) for part in parts]


def make(folder, *parts, vocab_size=65_536):
    folder.mkdir(exist_ok=True)
    count = write_tokens(folder, stream(*parts), vocab_size=vocab_size)
    assert count == sum(map(len, parts))
    return load_tokens(folder)


@pytest.mark.parametrize(("vocab_size", "kind"), [(65_536, "<u2"), (65_537, "<u4")])
def test_tokens_come_back_as_written_little_endian(tmp_path, vocab_size, kind):
    found = make(tmp_path / "t", IDS[:3], IDS[3:], vocab_size=vocab_size)
    raw = IDS.astype(kind).tobytes()
    assert found.path.read_bytes() == raw
    assert found.sha256 == hashlib.sha256(raw).hexdigest()
    assert found.windows([0], found.count)[0].tolist() == IDS.tolist()
    assert not found.windows([0], 3)[0].flags.writeable
    assert (found.count, found.text_bytes) == (7, 14)
    assert (found.vocab_size, found.dtype) == (vocab_size, {"<u2": "uint16", "<u4": "uint32"}[kind])


def test_a_window_past_the_end_is_filled_with_zeros(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(4, 7, dtype="<u2").tobytes())
    view = TokenFile(
        path=tmp_path / "a.bin", dtype="uint16", count=3, text_bytes=6, vocab_size=10, sha256=""
    )
    assert view.windows([0, 1], 4).tolist() == [[4, 5, 6, 0], [5, 6, 0, 0]]
    assert pickle.loads(pickle.dumps(view)) == view


@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "gone"])
def test_damage_to_the_tokens_is_noticed(tmp_path, damage):
    assert make(tmp_path / "t", IDS) is not None
    path = tmp_path / "t" / "tokens.bin"
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        content = {
            "cut": data[:-4],
            "longer": data + b"\0\0",
            "empty": b"",
        }[damage]
        path.write_bytes(content)
    assert load_tokens(tmp_path / "t") is None


def test_a_file_that_vanished_or_was_cut_later_is_named(tmp_path):
    found = make(tmp_path / "t", IDS)
    os.truncate(found.path, 8)
    with pytest.raises(DataError, match=r"tokens\.bin: 8 bytes are left of at least 14"):
        found.windows([0], 1)
    found.path.unlink()
    with pytest.raises(DataError, match=r"tokens\.bin: token file cannot be read: No such file"):
        found.windows([0], 1)


def test_a_full_disk_leaves_nothing(tmp_path):
    def build(folder):
        part = np.zeros(50_000, dtype=np.uint32)
        write_tokens(folder, [Encoded(part, 0)] * 10, vocab_size=256)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"name: no space left; free some.*HALFSTEP_C"):
            fetch(tmp_path, "name", load=load_tokens, build=build)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
