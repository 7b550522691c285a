import hashlib
import sysconfig
from pathlib import Path

import pytest

from halfstep.errors import DataError
from halfstep.trainer.data.corpus import prepare as stdlib
from halfstep.trainer.data.corpus.prepare import standard_library


def relative_names(folder, found):
    return [source.path.relative_to(folder).as_posix() for source in found]


@pytest.fixture
def library(write, tmp_path):
    for name in ("a.py", "b/c.py", "json/d.py", "z.py"):
        write(f"lib/{name}", f"# {name}\n")
    for skipped in (
        "test/x.py",
        "json/tests/x.py",
        "idlelib/idle_test/x.py",
        "lib2to3/tests/x.py",
        "site-packages/x.py",
        "dist-packages/x.py",
        "b/__pycache__/x.py",
        "ensurepip/_bundled/x.py",
        "readme.txt",
    ):
        write(f"lib/{skipped}", "no")
    write("lib/empty.py", "")
    write("lib/latin1.py", b"# \xe9\n")
    return tmp_path / "lib"


def test_only_its_own_utf8_python_is_listed(library):
    found = standard_library(library)
    assert sorted(relative_names(library, found)) == ["a.py", "b/c.py", "json/d.py", "z.py"]


def test_the_order_is_that_of_the_hashes_of_the_names(library):
    listed = relative_names(library, standard_library(library))
    assert listed == sorted(listed, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert listed != sorted(listed)  # or this test could not tell


def test_a_python_without_source_files_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path / "python.zip"))
    with pytest.raises(DataError, match=r"python\.zip: .* no standard library .* --data"):
        standard_library()


def test_the_running_python_has_one():
    folder = Path(sysconfig.get_path("stdlib"))
    listed = relative_names(folder, standard_library())
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(listed)
    folders = {part for name in listed for part in name.split("/")[:-1]}
    assert "unittest" in folders
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    # A fair sample: the last tenth holds names from all over the alphabet.
    tail = {name[0].lower() for name in listed[-len(listed) // 10 :]}
    assert len(tail) > 8
