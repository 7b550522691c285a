"""Whatever moment a preparation is killed at, what is found later is right or is made again."""

import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest

from halfstep.trainer.data.config import DataConfig
from halfstep.trainer.data.corpus import prepare

TEXT = "".join(f"the {a}{b} sat on the {b}{a}\n" for a in "abcdefgh" for b in "ijklmnop") * 40

# Every call that changes the disk, and every report of progress, is one moment. A child ends itself
# at moment N by SIGKILL, before that call takes place. One process forks all children, so that the
# libraries are imported once.
FORKED = """
import json, os, pathlib, signal, sys
from halfstep.trainer.data import corpus
from halfstep.trainer.data.config import DataConfig
from halfstep.trainer.data.corpus import prepare

text, folder = sys.argv[1], pathlib.Path(sys.argv[2])
corpus.BATCH_CHARACTERS = 1 << 14
moments = last = 0

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

def killed_at(number):
    global last
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    last = number
    os.environ["HALFSTEP_CACHE"] = str(folder / f"c{number}")
    for owner, name in (
        (os, "fsync"), (os, "rename"), (os, "mkdir"), (pathlib.Path, "mkdir"),
        (pathlib.Path, "write_text"),
    ):
        watched(owner, name)
    try:
        prepare(DataConfig(train=(text,), tokenizer="bpe:290"), moment)
        (folder / "moments").open("w").write(str(moments))
    finally:
        os._exit(0)

assert killed_at(0) == 0
count = int((folder / "moments").read_text())
# Spread over all of them, the first and the last included.
chosen = sorted({1 + (count - 1) * i // 15 for i in range(16)} | {count - 2})
ended = {number: os.waitstatus_to_exitcode(killed_at(number)) for number in chosen}
print(json.dumps([count, ended]))
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """The folder of all caches, and (moments, exit codes of the killed)."""
    folder = tmp_path_factory.mktemp("forked")
    text = folder / "a.txt"
    text.write_text(TEXT)
    found = subprocess.run(
        [sys.executable, "-c", FORKED, str(text), str(folder)],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    )
    return folder, json.loads(found.stdout)


def facts(folder, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFSTEP_CACHE", str(folder / cache))
        found = prepare(DataConfig(train=(str(folder / "a.txt"),), tokenizer="bpe:290"))
    return found.train.sha256, found.validation.sha256, found.tokenizer.fingerprint


def test_a_killed_preparation_never_leaves_a_wrong_file(forked):
    folder, (moments, killed) = forked
    expected = facts(folder, "good")
    assert moments > 25
    assert len(killed) >= 16
    for number, code in killed.items():
        assert code == -signal.SIGKILL
        for found in (folder / f"c{number}").glob("tokens/[0-9a-f]*/tokens.bin"):
            assert hashlib.sha256(found.read_bytes()).hexdigest() in expected
        assert facts(folder, f"c{number}") == expected
