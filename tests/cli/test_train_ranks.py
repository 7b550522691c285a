"""The real trainer on two ranks that a launcher starts; long runs are in test_faults.py.

What needs no launcher: tests/distributed/test_train_command.py.
"""

from __future__ import annotations

import os

import pytest
from tests.cli.ranks import (
    alone,
    assert_same_state,
    numbers,
    ranks,
    tiny,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def one(corpus, tmp_path_factory):
    """A finished run of one process that takes the ranks' shares one after the other."""
    path = tmp_path_factory.mktemp("one") / "r"
    with pytest.MonkeyPatch.context() as patch:
        alone([*tiny(corpus, path), "--grad-accum", "2"], patch)
    return path


# Python runs it before it runs halfstep. Rank 1 of the first attempt dies as its part of the last
# checkpoint is about to be written, when rank 0 has nothing left to do but to wait for it; or its
# disk is full then, however often it tries.
DIES_SAVING = """
import os, signal
if (os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")) == ("1", "0"):
    from halfstep import files
    files._WAITS = (0, 0, 0)
    real = files.LocalFileSystem.open
    def opened(self, path, mode="rb", **more):
        if "step-00000012" in path and mode == "wb":
            FAIL
        return real(self, path, mode, **more)
    files.LocalFileSystem.open = opened
"""


@pytest.mark.parametrize("fail", [
    "os.kill(os.getpid(), signal.SIGKILL)",
    pytest.param("raise OSError(28, 'No space left on device')", marks=pytest.mark.slow),
])  # fmt: skip
def test_two_ranks_of_which_one_fails_in_the_last_save_are_two_micro_batches(
    one, corpus, tmp_path, fail
):
    (tmp_path / "sitecustomize.py").write_text(DIES_SAVING.replace("FAIL", fail))
    path = tmp_path / "r"
    search = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = ["--nproc", 2, *tiny(corpus, path), "--", "--max-restarts", 3]
    code, out, err = ranks(words, PYTHONPATH=os.pathsep.join(search))
    assert code == 0, err
    assert numbers(path) == numbers(one)
    assert_same_state(path, one)
    assert {p.name for p in path.iterdir()} == {p.name for p in one.iterdir()}
    assert {p.name for p in (path / "checkpoints").iterdir()} == {
        "step-00000004", "step-00000008", "step-00000012",
    }  # fmt: skip

    assert len(out.splitlines()) == 2  # the summary and the verdict
    assert f"{path}: step 12; validation loss" in out
    # one rank of each attempt has printed the others
    assert err.count("2 ranks as data=2") == err.count("parameters, ") == 2
    assert err.count("step 4: validation loss") == 1
