"""Runs whose storage fails: a second folder, time without saving, and what a resume then finds."""

import errno
import math
import os
import resource
import shutil
import threading
from concurrent.futures import wait
from contextlib import nullcontext

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from tests.trainer.runs import metrics, newest
from tests.trainer.test_trainer import assert_same_state, net, pairs, plain, trainer

from halfstep import files
from halfstep.diagnostics.metrics import append_line, write_waiting
from halfstep.errors import CheckpointError, ConfigError, NonFiniteError, PartedError, StorageError
from halfstep.trainer import checkpoint, loop
from halfstep.trainer.checkpoint import list_checkpoints, load_checkpoint
from halfstep.trainer.config.run import RunConfig
from halfstep.trainer.run import _require_unsaved


@pytest.fixture
def failing(monkeypatch):
    """Make writing below a folder fail: ``failing(folder, errno)``; 0 mends it."""
    codes, real = {}, LocalFileSystem.open
    monkeypatch.setattr(files, "_WAITS", (0.0, 0.0))

    def opened(self, path, mode="rb", **more):
        for folder, code in codes.items():
            if code and "w" in mode and str(path).startswith(f"{folder}/"):
                raise OSError(code, os.strerror(code))
        return real(self, path, mode, **more)

    monkeypatch.setattr(LocalFileSystem, "open", opened)
    return lambda folder, code: codes.update({str(folder): code})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to."""
    return trainer(tmp_path_factory.mktemp("whole") / "r", save_every=2).train().folder


@pytest.mark.parametrize(
    ("second", "code"),
    [("{}/second", errno.EIO), ("memory://{}/second", errno.ENOSPC), ("file://{}/s", errno.EROFS)],
)
def test_a_checkpoint_goes_to_the_second_folder_and_a_resume_finds_it(
    tmp_path, failing, whole, second, code
):
    second, said = second.format(tmp_path), []
    first = tmp_path / "r" / "checkpoints"

    def watch(tick):
        said.extend(tick.verdicts)
        failing(first, code if tick.record.step in (2, 3, 4, 5) else 0)
        if tick.record.step == 6:
            raise KeyboardInterrupt

    given = {"second_dir": second, "save_every": 2}
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "r", callbacks=[watch], **given).train()
    assert [p.name for p in list_checkpoints(first)] == ["step-00000002"]
    assert [str(p)[-1] for p in list_checkpoints(second)] == ["4", "6"]
    assert sum("SAVED IN THE SECOND FOLDER, as " in text for text in said) == 2
    trainer(tmp_path / "r", **given).train(resume=True)
    assert_same_state(tmp_path / "r", whole)
    assert metrics(tmp_path / "r") == metrics(whole)
    failing(first, code)
    with pytest.raises(ConfigError, match="exists already; choose an empty folder"):
        trainer(tmp_path / "other", **given).train()


def test_a_resume_with_another_folder_goes_on_from_the_one_before(tmp_path, failing, whole):
    def stop(tick):
        if tick.record.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "r", callbacks=[stop], save_every=2).train()
    given = {"save_every": 2, "checkpoint_dir": str(tmp_path / "moved")}
    with pytest.raises(ConfigError, match="exists already"):  # of another run
        trainer(tmp_path / "r", **given, second_dir=str(whole / "checkpoints")).train(resume=True)
    trainer(tmp_path / "r", **given).train(resume=True)
    assert metrics(tmp_path / "r") == metrics(whole)
    last, wanted = list_checkpoints(tmp_path / "moved")[-1], list_checkpoints(whole / "checkpoints")
    assert last.name == wanted[-1].name


def test_a_resume_whose_checkpoints_are_gone_is_refused(tmp_path, capsys):
    second = tmp_path / "r" / "second"  # in the run's own folder
    folder = trainer(tmp_path / "r", save_every=2, second_dir=str(second)).train().folder
    lines = metrics(folder)
    (folder / "checkpoints").rename(tmp_path / "unmounted")
    gone = pytest.raises(CheckpointError, match=r"no checkpoint .*; bring its checkpoints back")
    with gone:
        trainer(tmp_path / "r", save_every=2).train(resume=True)
    for known in (True, False):  # a launcher's later attempt begins again what was never saved
        with gone if known else nullcontext():
            _require_unsaved(folder, RunConfig(max_steps=12, save_every=2), attempt=1)
        (folder / "newest-checkpoint.txt").rename(tmp_path / "newest") if known else None
    (tmp_path / "newest").rename(folder / "newest-checkpoint.txt")
    (folder / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="it is a file"):
        trainer(tmp_path / "r", save_every=2).train(resume=True)
    assert metrics(folder) == lines
    (folder / "checkpoints").unlink()
    (tmp_path / "unmounted" / "step-00000010").rename(second / "step-00000010")
    trainer(tmp_path / "r", save_every=2, quiet=False).train(resume=True)
    assert "newest checkpoint was" in capsys.readouterr().err


@pytest.mark.parametrize("deadline", [600.0, 0.0])
def test_training_goes_on_without_saving_until_the_deadline(tmp_path, failing, whole, deadline):
    first, said = tmp_path / "r" / "checkpoints", []

    def watch(tick):
        said.extend(tick.verdicts)
        for folder in (first, tmp_path / "second"):
            failing(folder, errno.ENOSPC if 2 <= tick.record.step < 8 else 0)

    more = {} if deadline else {"second_dir": str(tmp_path / "second")}
    made = trainer(tmp_path / "r", callbacks=[watch], save_every=2, save_deadline=deadline, **more)
    if not deadline:
        both = r"No space.*step-00000002, is intact; .*second.*no earlier one in it\. Free space"
        with pytest.raises(StorageError, match=both) as error:
            made.train()
        assert error.value.exit_code == 75
        failing(first, 0)
        trainer(tmp_path / "r", save_every=2).train(resume="last-good")
    else:
        made.train()
        assert sum("by --second-dir. Training goes on" in text for text in said) == 3
    assert_same_state(tmp_path / "r", whole)
    assert {p.name for p in first.iterdir()} <= {p.name for p in (whole / "checkpoints").iterdir()}


def test_checkpoints_by_url_and_last_good_over_both_folders(tmp_path, whole):
    given = {"checkpoint_dir": f"memory://{tmp_path}/c", "save_every": 2}
    second = tmp_path / "second"

    def watch(tick):
        if tick.record.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "r", second_dir=str(second), callbacks=[watch], **given).train()
    assert not (tmp_path / "r" / "checkpoints").exists()
    bad = list_checkpoints(given["checkpoint_dir"])[-1] + "/shard-00001-model-00001.safetensors"
    files.write_hashed(bad, files.read_whole(bad)[:-1] + b"x")
    with pytest.raises(ConfigError, match="allowed: True, False or 'last-good'"):
        trainer(tmp_path / "r", **given).train(resume="newest good")
    trainer(tmp_path / "r", second_dir=str(second), **given).train(resume="last-good")
    ended = load_checkpoint(list_checkpoints(given["checkpoint_dir"])[-1])
    for name, weight in newest(whole).weights.items():
        assert bool((ended.weights[name] == weight).all()), name
    assert "damaged-step-00000008" in files.names_in(given["checkpoint_dir"])


@pytest.fixture
def disk(monkeypatch):
    """What step 4's files wait for until it is set: a disk that is slow, while training goes on."""
    ready, real = threading.Event(), checkpoint.make_lasting

    def lasting(where, sha):
        assert "step-00000004" not in str(where) or ready.wait(60)
        real(where, sha)

    monkeypatch.setattr(checkpoint, "make_lasting", lasting)
    monkeypatch.setattr(loop, "STILL_SECONDS", 0.0)
    return ready


def written(folder):
    return {path.name: path.read_bytes() for path in folder.glob("shard-*")}


@pytest.mark.parametrize(
    ("model", "precision"), [(net, "bf16-mixed"), (plain, "bf16-split,moments=8bit")]
)
def test_a_save_in_the_background_is_of_its_step_and_a_kill_leaves_the_one_before(
    tmp_path, disk, model, precision
):
    given = {"save_every": 2, "precision": precision, "ema_decay": 0.9}
    disk.set()
    whole = trainer(tmp_path / "whole", model(), **given).train().folder / "checkpoints"
    disk.clear()
    folder, told = tmp_path / "r" / "checkpoints", []

    def watch(tick):
        told.append(tick.checkpoint and tick.checkpoint.name)
        if tick.record.step in (4, 5):
            assert [p.name for p in list_checkpoints(folder)] == ["step-00000002"]
            shutil.copytree(tmp_path / "r", tmp_path / f"killed-{tick.record.step}")
        if tick.record.step == 5:
            disk.set()

    trainer(tmp_path / "r", model(), **given, callbacks=[watch]).train()
    assert [p.name for p in list_checkpoints(folder)] == sorted(p.name for p in whole.iterdir())
    assert "step-00000004" not in told[:5]
    assert told[11] == "step-00000012"
    for path in whole.iterdir():
        assert written(path) == written(folder / path.name)
    for step in (4, 5):
        path = tmp_path / f"killed-{step}"
        trainer(path, model(), **given).train(resume=True)
        assert written(path / "checkpoints" / "step-00000012") == written(whole / "step-00000012")
        assert metrics(path) == metrics(whole.parent)


def failing_fsync(monkeypatch, part, times, lost=False):
    """Make fsync of paths with this part fail so often by EIO; step 2's in the background.

    Returns a callback: while it has not been called, step 2's files wait.
    """
    left, ready, saves, real = [times], threading.Event(), [], os.fsync
    monkeypatch.setattr(files, "_WAITS", (0.0, 0.0))
    monkeypatch.setattr(loop, "STILL_SECONDS", 0.0)
    save = loop.save_checkpoint
    monkeypatch.setattr(
        loop, "save_checkpoint", lambda *a, **k: (saves.append(save(*a, **k)), saves[-1])[1]
    )

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        assert "step-00000002/" not in path or ready.wait(60)
        if left[0] and part in f"{path}$":
            left[0] -= 1
            if lost:  # as some file systems drop what they could not write
                os.truncate(path, 0)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    def watch(tick):
        if tick.record.step == 2:
            ready.set()
            wait(saves[0].lasting)

    monkeypatch.setattr(os, "fsync", fsync)
    return watch


def test_each_checkpoint_is_told_once(tmp_path, disk):
    told = []

    def watch(tick):
        told.extend((tick.record.step, path.name[-1]) for path in tick.checkpoints)
        assert tick.record.step != 5 or not disk.set()

    trainer(tmp_path / "r", max_steps=6, callbacks=[watch]).train()
    assert told == [(6, "4"), (6, "6")]


@pytest.mark.parametrize(
    ("part", "times", "lost"),
    [
        ("02/shard", 1, False),
        ("02/shard", 99, False),
        ("02/shard", 1, True),
        ("checkpoints$", 1, False),
    ],
)  # the last one fails when step 2 has its name
def test_a_disk_that_fails_in_the_background_gets_a_save_of_a_later_step(
    tmp_path, monkeypatch, whole, part, times, lost
):
    watch = failing_fsync(monkeypatch, part, times, lost)
    said, path = [], tmp_path / "r"
    watches = [watch, lambda tick: said.extend(tick.verdicts)]
    trainer(path, callbacks=watches, save_every=2).train()
    kept = [int(str(p)[-2:]) for p in list_checkpoints(path / "checkpoints")]
    fails = lost or times > 1
    assert (2 in kept) != fails
    assert {4, 6, 8, 10, 12} <= set(kept)
    assert [text[:11] for text in said if "SAVED" in text] == ["SAVED AGAIN"] * fails
    assert_same_state(path, whole)


@pytest.mark.parametrize(("second", "deadline"), [("second", 0.0), ("", 600.0), ("", 0.0)])
def test_a_disk_that_always_fails_in_the_background_is_no_disk(
    tmp_path, monkeypatch, second, deadline
):
    watch = failing_fsync(monkeypatch, "r/checkpoints/.unfinished", math.inf)
    said, second = [], second and str(tmp_path / second)
    watches = [watch, lambda tick: said.extend(text[:9] for text in tick.verdicts)]
    given = {"save_every": 2, "save_deadline": deadline, "callbacks": watches}
    made = trainer(tmp_path / "r", second_dir=second, **given)
    with nullcontext() if second else pytest.raises(StorageError, match="Free space"):
        made.train()
    if second:
        assert str(list_checkpoints(second)[0])[-1] == "3"
        assert set(said) == {"SAVED IN "}
    else:
        assert len(metrics(tmp_path / "r")) == (12 if deadline else 3)
        assert said == ["NOT SAVED"] * (5 if deadline else 0)


def test_a_best_state_that_no_disk_took_leaves_the_best_before(tmp_path, failing):
    losses, folder = iter([0.5, 0.1, *[0.9] * 9]), tmp_path / "r" / "checkpoints"
    made = trainer(
        tmp_path / "r", val_data=pairs(8), eval_every=2, keep=1,
        evaluate=lambda *_: {"loss": torch.tensor(next(losses))},
        callbacks=[lambda t: failing(folder, errno.ENOSPC if t.record.step == 3 else 0)],
    )  # fmt: skip
    assert made.train().best.loss == 0.5
    assert list_checkpoints(folder)[0].name == "step-00000002"


def test_the_error_that_ends_a_run_is_not_replaced_by_that_of_its_disk(tmp_path, monkeypatch):
    watches = [
        failing_fsync(monkeypatch, "step-00000002/", math.inf),
        lambda t: t.record.step < 2 or 1 / 0,
    ]
    with pytest.warns(UserWarning, match="2 cannot be written"), pytest.raises(ZeroDivisionError):
        trainer(tmp_path / "r", save_every=2, callbacks=watches).train()


def test_a_run_that_stops_names_the_checkpoint_that_was_in_the_background(tmp_path, disk):
    def watch(tick):
        if tick.record.step == 4:
            disk.set()
            model[0].weight.data.fill_(float("nan"))

    model = plain()
    with pytest.raises(NonFiniteError, match=r"step 5: .*last checkpoint is .*step-00000004"):
        trainer(tmp_path / "r", model, callbacks=[watch], save_every=2).train()
    assert list_checkpoints(tmp_path / "r" / "checkpoints")[-1].name == "step-00000004"


@pytest.mark.parametrize("key", ["checkpoint_dir", "second_dir"])
@pytest.mark.parametrize(
    "folder", ["{}/file/c", "{}/gone/c", "nowhere://c", "file://", "memory:///"]
)
def test_a_folder_that_takes_no_checkpoint_is_refused_before_a_step(tmp_path, failing, key, folder):
    (tmp_path / "file").write_text("")
    failing(tmp_path / "gone", errno.EROFS)
    given = {key: folder.format(tmp_path), "max_steps": 4}
    for how in (False, True):
        with pytest.raises(
            (ConfigError, CheckpointError), match=f"{given[key]}.*(choose another|allowed: )"
        ):
            trainer(tmp_path / "r", **given).train(resume=how)
        if not how:
            trainer(tmp_path / "r", max_steps=2).train()
    assert len(metrics(tmp_path / "r")) == 2
    with pytest.raises(ConfigError, match="output_dir=s3://b/r; allowed: a folder"):
        trainer("s3://b/r")


def test_a_folder_that_is_full_or_was_the_runs_own_is_no_reason_to_refuse(tmp_path, failing, whole):
    first, second = tmp_path / "c", tmp_path / "second"
    failing(first, errno.ENOSPC)
    given = {"checkpoint_dir": str(first), "second_dir": str(second), "save_every": 2}
    trainer(tmp_path / "r", max_steps=4, **given).train()
    trainer(tmp_path / "r", max_steps=6, **given).train(resume=True)
    failing(second, errno.EROFS)
    trainer(tmp_path / "r", max_steps=6, **given).train(resume=True)  # nothing is left to train
    failing(first, errno.EROFS)
    with pytest.raises(CheckpointError, match=f"{second} cannot take checkpoints"):
        trainer(tmp_path / "r", **given).train(resume=True)
    given["checkpoint_dir"] = str(tmp_path / "new")
    trainer(tmp_path / "r", **given).train(resume=True)
    assert list_checkpoints(tmp_path / "new")[-1].name == "step-00000012"


def test_lines_that_a_full_disk_does_not_take_are_written_later_or_lost_with_a_word(tmp_path):
    path, (soft, hard) = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))  # the first bytes of a line still fit
    try:
        with pytest.warns(UserWarning, match="too large.*kept for later"):
            append_line(path, {"step": 1})
        write_waiting(tmp_path / "of another run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append_line(path, {"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    with pytest.warns(UserWarning, match="kept for later"):
        append_line(tmp_path / "none" / "health.jsonl", {"step": 1})
    with pytest.warns(UserWarning, match="its lines are lost"):
        write_waiting(tmp_path / "none")


def test_lines_that_wait_are_written_when_the_run_ends(tmp_path):
    file, aside = tmp_path / "r" / "metrics.jsonl", tmp_path / "aside"

    def watch(tick):
        if tick.record.step == 11:
            file.rename(aside)
            file.mkdir()
        if tick.record.step == 12:
            file.rmdir()
            aside.rename(file)

    with pytest.warns(UserWarning, match="kept for later"):
        trainer(tmp_path / "r", callbacks=[watch]).train()
    assert len(metrics(tmp_path / "r")) == 12


def test_ranks_that_have_parted_are_what_a_nan_tells(tmp_path, monkeypatch):
    """A flipped weight may overflow: the run starts again, where it would stop for good."""

    def parted(self):
        raise PartedError("rank 1 differs from rank 0 in weight")

    made = trainer(tmp_path / "r", learning_rate=1e38, warmup_steps=0, precision="fp32")
    with pytest.raises(NonFiniteError):
        made.train()
    made = trainer(tmp_path / "s", learning_rate=1e38, warmup_steps=0, precision="fp32")
    monkeypatch.setattr("halfstep.precision.scaling.gradients.OneRank.agree", parted)
    with pytest.raises(PartedError):
        made.train()
