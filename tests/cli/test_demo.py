"""The demo: what it checks before it trains, what it prints, what it draws."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from halfstep.cli import bench, demo
from halfstep.cli.grammar import read_words
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


def last_lines(text, count):
    return [line.strip() for line in text.rstrip().splitlines()[-count:]]


def test_it_ends_with_table_verdict_figure_and_a_command(config, halfstep, fakes, cpu, tmp_path):
    cpu("avx512_bf16")
    fakes(here)
    done = halfstep("demo", "--config", config, "--max-steps", 3, "--output-dir", "d")
    assert done.returncode == 0, done.stderr
    shown = done.stdout[done.stdout.index("precision ") :]
    header, *rows = shown.splitlines()[:4]
    assert header.split() == ["precision", "products", "val", "loss", "tokens/s", "peak", "memory",
                              "skipped", "seconds"]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["fp32", "bf16-mixed", "fp16-mixed"]
    assert {len(row) for row in rows} == {len(header)}

    runs = {row.split()[0]: json.loads(
        (tmp_path / "d" / row.split()[0] / "metrics.jsonl").read_text().splitlines()[-1]
    ) for row in rows}  # fmt: skip
    for row in rows:
        assert row.split()[2] == f"{runs[row.split()[0]]['val_loss']:.4f}"
    (said,) = re.findall(r"^Beside fp32, .*$", shown, re.MULTILINE)
    (other,) = re.findall(r"Beside fp32, (\S+) trains", said)
    change = runs[other]["val_loss"] / runs["fp32"]["val_loss"] - 1
    assert said.endswith(f"its validation loss differs by {change:+.2%}.")

    figure, _, command = last_lines(shown, 3)
    assert figure == "Figure: d/demo.png"
    assert (tmp_path / "d/demo.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "d/demo.svg").read_text().count("<svg") == 1
    words = shlex.split(command.removeprefix("Next:"))  # it can be typed as it stands
    assert (words[0], read_words(words[1:])[0]) == ("halfstep", "report")


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("tf32", "cannot be honoured"),
        ("bf61", "unknown precision policy"),
    ],
)
def test_every_precision_is_checked_before_the_first_run(
    precision, words, config, halfstep, fakes, tmp_path
):
    fakes(lambda *_, **__: pytest.fail("a run was started"))
    done = halfstep("demo", "--config", config, "--precisions", "fp32", precision, "--max-steps", 2)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "runs").exists()


def test_what_is_compared_where_none_is_named(config, halfstep, fakes, cpu, tmp_path):
    started = []

    def broken(command, **_):
        # the data was prepared before, or it would count for the first run's memory and seconds
        assert len([*(tmp_path / "cache").rglob("tokens.bin")]) == 2
        started.append(Path(command[command.index("--config") + 1]).stem)
        return subprocess.CompletedProcess(command, 0 if started[-1] != "fp16-mixed" else 7, "", "")

    def side(folder, policy, *_):
        return demo.Side(precision=str(policy), simulated=False, steps=[1], losses=[1.0],
                         val_loss=1.0, rate=1.0, quartiles=(1.0, 1.0), peak_bytes=1, skipped=0,
                         seconds=1.0)  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_side", side)
        fakes(broken)
        cpu("bf16")
        assert halfstep("demo", "--config", config).returncode == 7  # that of the run
        assert started == ["fp32", "bf16-mixed", "fp16-mixed"]
        started.clear()
        cpu("avx2")
        assert halfstep("demo", "--config", config).returncode == 7
        assert started == ["fp32", "fp16-mixed"]


def test_a_configuration_of_another_task_is_refused(halfstep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = halfstep("demo", "--config", "classify-scratch")
    assert done.returncode == 2
    assert "trains language models" in done.stderr


def test_it_ends_with_a_verdict(config, halfstep, fakes, cpu):
    cpu("avx512_bf16")
    fakes(here)
    done = halfstep("demo", "--config", config, "--max-steps", 2,
                    "--precisions", "fp32", "bf16-mixed", "--output-dir", "d")  # fmt: skip
    assert "Beside fp32" in done.stdout
