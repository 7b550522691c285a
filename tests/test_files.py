"""A file that is written anew is the old one or the new one, never a part of either."""

import errno
import json
import threading
from pathlib import Path

import pytest

from halfstep.diagnostics.metrics import keep_lines
from halfstep.errors import CheckpointError
from halfstep.files import THREADS, each_of, write_whole


@pytest.fixture
def full_disk(monkeypatch):
    """Files take the first half of what is written to them, and then there is no space."""

    def cut(self, data, *_, **__):
        content = data.encode() if isinstance(data, str) else data
        with self.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", cut)
    monkeypatch.setattr(Path, "write_bytes", cut)


LINES = [json.dumps({"step": step}) for step in range(1, 9)]


def test_all_or_nothing(tmp_path, full_disk):
    path = tmp_path / "some.txt"
    with path.open("w") as file:
        file.write("before")
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "afterwards")
    assert path.read_text() == "before"


def test_lines_of_later_steps_and_torn_ones_are_dropped(tmp_path):
    path = tmp_path / "causes.jsonl"
    path.write_text("\n".join([*LINES, '{"step": 3, "other": 9}', "[]", '{"step"']))
    keep_lines(path, 3)
    assert path.read_text().splitlines() == [*LINES[:3], '{"step": 3, "other": 9}']
    assert [file.name for file in tmp_path.iterdir()] == ["causes.jsonl"]


def test_a_resume_on_a_full_disk_loses_no_line(tmp_path, full_disk):
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        file.write("\n".join(LINES))
    with pytest.raises(CheckpointError, match="No space"):
        keep_lines(path, 5)
    assert path.read_text().splitlines() == LINES


def test_items_are_worked_on_side_by_side_by_this_thread_too():
    meeting = threading.Barrier(THREADS)
    each_of(lambda _: meeting.wait(5), range(THREADS))  # raises unless all are at work at once
