"""Whatever moment a preparation is killed at, what is found later is right or is made again."""

import hashlib
import os
import signal
import subprocess
import sys
import time

import pytest

from halfstep.trainer.data.config import DataConfig
from halfstep.trainer.data.corpus.prepare import prepare

TEXT = "".join(f"the {a}{b} sat on the {b}{a}\n" for a in "abcdefgh" for b in "ijklmnop") * 40

# Every call that changes the disk, and every report of progress, is one moment. The process ends
# itself at moment N by SIGKILL, before that call takes place.
KILLED = """
import builtins, os, pathlib, signal, sys
from halfstep.trainer.data.corpus import documents
from halfstep.trainer.data.config import DataConfig
from halfstep.trainer.data.corpus.prepare import prepare

text, cache, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
documents.BATCH_BYTES = 1 << 14
moments = 0

def moment(*_):
    global moments
    moments += 1
    if moments == last:
        os.kill(os.getpid(), signal.SIGKILL)

def watched(owner, name):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        moment()
        return real(*args, **kwargs)
    setattr(owner, name, call)

watched(os, "fsync")
watched(os, "rename")
watched(os, "mkdir")
watched(pathlib.Path, "mkdir")
watched(pathlib.Path, "write_text")
prepare(DataConfig(train=(text,), tokenizer="bpe:290", cache_dir=cache), moment)
print(moments)
"""

TWO_AT_ONCE = """
import os, sys, time
from halfstep.trainer.data.config import DataConfig
from halfstep.trainer.data.corpus.prepare import prepare

text, cache, start = sys.argv[1], sys.argv[2], float(sys.argv[3])
time.sleep(max(0, start - time.time()))
prepared = prepare(DataConfig(train=(text,), tokenizer="bpe:290", cache_dir=cache))
print(prepared.train.sha256, prepared.validation.sha256, prepared.tokenizer.fingerprint)
"""


def start(code, *args):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def facts(prepared):
    return prepared.train.sha256, prepared.validation.sha256, prepared.tokenizer.fingerprint


@pytest.fixture
def text(write):
    return write("a.txt", TEXT)


@pytest.fixture
def expected(text, tmp_path):
    config = DataConfig(train=(str(text),), tokenizer="bpe:290", cache_dir=str(tmp_path / "good"))
    return prepare(config)


def test_a_killed_preparation_never_leaves_a_wrong_file(text, expected, tmp_path):
    whole = start(KILLED, text, tmp_path / "whole", 0)
    output, errors = whole.communicate(timeout=60)
    assert whole.returncode == 0, errors
    moments = int(output)
    assert moments > 25
    # Spread over all of them, the first and the last included: two cores, so two at a time.
    chosen = sorted({1 + (moments - 1) * i // 15 for i in range(16)} | {moments - 2})
    for pair in zip(chosen[::2], [*chosen[1::2], None], strict=False):
        running = {n: start(KILLED, text, tmp_path / f"c{n}", n) for n in pair if n}
        for n, process in running.items():
            process.communicate(timeout=60)
            assert process.returncode == -signal.SIGKILL
            cache = tmp_path / f"c{n}"
            for found in cache.glob("tokens/[0-9a-f]*/tokens.bin"):
                digest = hashlib.sha256(found.read_bytes()).hexdigest()
                assert digest in (expected.train.sha256, expected.validation.sha256)
            config = DataConfig(train=(str(text),), tokenizer="bpe:290", cache_dir=str(cache))
            assert facts(prepare(config)) == facts(expected)


def test_leftovers_of_a_killed_process_are_ignored_and_removed_after_a_day(
    text, expected, tmp_path
):
    root = tmp_path / "good" / "tokens"
    for age, name in ((10, ".tmp-young"), (90_000, ".tmp-old")):
        (root / name).mkdir()
        (root / name / "tokens.bin").write_bytes(b"half")
        for path in (root / name / "tokens.bin", root / name):
            os.utime(path, (time.time() - age,) * 2)
    config = DataConfig(train=(str(text),), tokenizer="bytes", cache_dir=str(tmp_path / "good"))
    prepare(config)
    assert (root / ".tmp-young").exists()
    assert not (root / ".tmp-old").exists()


def test_two_processes_at_once_both_end_well(text, expected, tmp_path):
    cache, together = tmp_path / "shared", time.time() + 1.0
    running = [start(TWO_AT_ONCE, text, cache, together) for _ in range(3)]
    for process in running:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert output.split() == list(facts(expected))
    assert [path for path in cache.rglob(".tmp-*")] == []
