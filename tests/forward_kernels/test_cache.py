"""The folder of compiled kernels: what lies there is run, so it must be this user's own build."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from halfstep.kernels.library import load_library

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
OWN = 'extern "C" void asked() {}'
FOREIGN = OWN + '\n#include <cstdio>\n__attribute__((constructor)) void f() { fopen("RAN", "w"); }'


def compiled(source: str, path: Path) -> None:
    subprocess.run(
        ["g++", "-x", "c++", "-shared", "-fPIC", "-o", str(path), "-"],
        input=source, text=True, check=True,
    )  # fmt: skip


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A loader whose compiler copies a small library, and counts how often it was asked."""
    compiled(OWN, tmp_path / "small.so")
    compiler = tmp_path / "cxx"
    compiler.write_text(
        f'#!/bin/sh\necho >> {tmp_path}/built\nfor a; do [ "$o" = -o ] && to=$a; o=$a; done\n'
        f'cp {tmp_path}/small.so "$to"\n'
    )
    compiler.chmod(0o755)
    for name in ("HALFSTEP_KERNEL", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: load_library(("optim/kernels/cpu.cpp",), {"asked": ()}, fused=True)


def builds(tmp_path: Path) -> int:
    return len((tmp_path / "built").read_text().splitlines())


def test_only_this_user_can_read_or_write_what_is_built_and_it_is_built_once(
    load, tmp_path, monkeypatch
):
    before = os.umask(0)
    try:
        assert isinstance(load(), ctypes.CDLL)
    finally:
        os.umask(before)
    paths = [tmp_path / "cache/halfstep", *(tmp_path / "cache/halfstep").rglob("*")]
    assert len(paths) == 4
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o022 == 0 for path in paths)
    assert isinstance(load(), ctypes.CDLL)
    assert builds(tmp_path) == 1
    monkeypatch.setenv("CXXFLAGS", "-g1")  # and anew with other flags
    assert isinstance(load(), ctypes.CDLL)
    assert builds(tmp_path) == 2


def changed(library: Path, content: bytes) -> None:
    library.unlink()  # this process has the old file in its memory
    library.write_bytes(content)


def by_link(library: Path, foreign: Path) -> None:
    library.unlink()
    library.symlink_to(foreign)
    library.with_suffix(".sha256").write_text(sha256(foreign))


def with_hash(library: Path, foreign: Path) -> None:
    changed(library, foreign.read_bytes())
    library.with_suffix(".sha256").write_text(sha256(foreign))


def others_may_write(library: Path, foreign: Path) -> None:
    with_hash(library, foreign)
    library.parent.chmod(0o777)
    library.chmod(0o666)


def of_another_user(library: Path, foreign: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    with_hash(library, foreign)
    os.chown(library, 65534, 65534)


def flipped(library: Path, foreign: Path) -> None:
    raw = bytearray(library.read_bytes())
    raw[len(raw) // 2] ^= 1
    changed(library, bytes(raw))


HARM = {
    "foreign content": lambda library, foreign: changed(library, foreign.read_bytes()),
    "link": by_link,
    "others may write": others_may_write,
    "another user's": of_another_user,
    "flipped bit": flipped,
    "truncated": lambda library, _: changed(library, library.read_bytes()[:5000]),
    "empty": lambda library, _: changed(library, b""),
    "a folder": lambda library, _: (library.unlink(), library.mkdir()),
    "hash not text": lambda library, _: library.with_suffix(".sha256").write_bytes(b"\xff"),
    "no hash": lambda library, _: library.with_suffix(".sha256").unlink(),
}


def sha256(path: Path) -> str:
    return subprocess.check_output(["sha256sum", str(path)], text=True).split()[0]


@pytest.mark.parametrize("harm", HARM)
def test_what_is_not_as_it_was_built_is_never_run_and_built_anew(load, tmp_path, harm):
    load()
    (library,) = (tmp_path / "cache/halfstep/kernels").glob("*.so")
    foreign, ran = tmp_path / "foreign.so", tmp_path / "ran"
    compiled(FOREIGN.replace("RAN", str(ran)), foreign)
    HARM[harm](library, foreign)
    found = load()
    assert not ran.exists()
    if harm == "a folder":
        assert "failed: " in str(found)
    else:
        assert isinstance(found, ctypes.CDLL)
        assert isinstance(load(), ctypes.CDLL)
        assert builds(tmp_path) == 2


def test_a_library_without_a_function_is_built_anew_once_and_then_named(load, tmp_path):
    load()
    (library,) = (tmp_path / "cache/halfstep/kernels").glob("*.so")
    compiled('extern "C" void other() {}', tmp_path / "other.so")
    with_hash(library, tmp_path / "other.so")
    assert isinstance(load(), ctypes.CDLL)
    shutil.copy(tmp_path / "other.so", tmp_path / "small.so")
    library.unlink()
    assert "undefined symbol: asked" in str(load())


@pytest.mark.parametrize("which", ["halfstep", "halfstep/kernels"])
def test_a_folder_that_is_a_link_is_refused_by_name(load, tmp_path, which):
    path = tmp_path / "cache" / which
    path.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    assert str(load()).startswith(f"{path} is a link or another user's")
    assert not (tmp_path / "built").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused(load, tmp_path):
    path = tmp_path / "cache/halfstep"
    path.mkdir(parents=True)
    os.chown(path, 65534, 65534)
    assert "set XDG_CACHE_HOME to a folder of yours" in str(load())
