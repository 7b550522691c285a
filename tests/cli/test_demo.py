"""The demo: what it checks before it trains, what it prints, what it draws."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from halfstep.cli import bench
from halfstep.cli.main import main
from halfstep.precision.policy import devices


def here(command, **_):
    """A process of the demo that is this one."""
    assert command[:4] == [sys.executable, "-m", "halfstep", "train"]
    return subprocess.CompletedProcess(command, main(command[3:]), "", "")


@pytest.fixture
def config(tmp_path, corpus, monkeypatch):
    """A file for a GPT of one layer; its data is prepared in a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.toml"
    path.write_text(
        "[model]\nn_layer = 1\nn_head = 2\nn_embd = 32\nblock_size = 32\n"
        f'[data]\ntrain = ["{corpus}"]\ntokenizer = "bytes"\n[run]\nbatch_size = 4\n'
        'device = "cpu"\neval_batches = 2\n[schedule]\nwarmup_steps = 50\n'
    )
    return path


@pytest.fixture
def cpu(monkeypatch):
    def pretend(*flags):
        monkeypatch.setattr(devices, "cpu_instructions", lambda: frozenset(flags))

    return pretend


@pytest.fixture
def fakes(monkeypatch):
    """Puts a function in the place of the processes of the demo."""

    def put(run):
        fake = SimpleNamespace(
            run=run, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE,
            CompletedProcess=subprocess.CompletedProcess,
        )  # fmt: skip
        monkeypatch.setattr(bench, "subprocess", fake)

    return put


def test_it_ends_with_a_table_a_verdict_and_a_page(config, halfstep, fakes, cpu, tmp_path):
    cpu("avx512_bf16")
    fakes(here)
    done = halfstep("demo", "--config", config, "--steps", 3, "--out", "d")
    assert done.returncode == 0, done.stderr
    shown = done.stdout[done.stdout.index("policy ") :]
    header, *rows = shown.splitlines()[:4]
    assert header.split() == ["policy", "tokens/s", "times", "peak", "memory", "loss", "lost"]
    assert [row.split()[0] for row in rows] == ["fp32", "bf16-mixed", "fp16-mixed"]
    assert len(shown.splitlines()) > 6  # the verdict of the report
    assert shown.splitlines()[-1] == "Written: d/report.html"
    page = (tmp_path / "d/report.html").read_text()
    assert "fp16-mixed" in page
    assert page.count("<svg") >= 1
