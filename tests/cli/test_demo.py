"""The demo: what it checks before it trains, what it prints, what it draws."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from halfstep.cli import demo
from halfstep.cli.grammar import read_words
from halfstep.cli.main import main
from halfstep.precision.policy import devices
from halfstep.shown import columns
from halfstep.words import LANGUAGES


class Here:
    """A process of the demo that is this one."""

    def __init__(self, command, **_):
        assert command[:4] == [sys.executable, "-m", "halfstep", "train"]
        self.words = command[3:]

    def wait(self, timeout=None):
        return main(self.words)


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
    """Puts a class in the place of the processes of the demo."""

    def put(popen):
        fake = SimpleNamespace(
            Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
        )
        monkeypatch.setattr(demo, "subprocess", fake)

    return put


def last_lines(text, count):
    return [line.strip() for line in text.rstrip().splitlines()[-count:]]


def test_it_ends_with_table_verdict_figure_and_two_commands(config, halfstep, fakes, cpu, tmp_path):
    cpu("avx512_bf16")
    fakes(Here)
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

    figure, first, second = last_lines(shown, 3)
    assert figure == "Figure: d/demo.png"
    assert (tmp_path / "d/demo.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "d/demo.svg").read_text().count("<svg") == 1
    commands = [first.removeprefix("Next:").strip(), second]
    assert all(line.startswith("halfstep ") for line in commands)
    assert shown.count("halfstep ") == 2  # and not more
    for line in commands:  # they can be typed as they stand
        assert read_words(shlex.split(line)[1:])[0] in line


def test_it_speaks_chinese(config, halfstep, fakes, cpu):
    cpu("avx512_bf16")
    fakes(Here)
    done = halfstep(
        "demo", "--config", config, "--max-steps", 1, "--output-dir", "d", "--lang", "zh"
    )
    header, *rows = done.stdout[done.stdout.index("精度 ") :].splitlines()[:4]
    assert header.split() == [
        "精度",
        "矩阵乘",
        "验证损失",
        "token/秒",
        "内存峰值",
        "跳过的步",
        "秒数",
    ]
    assert [row.split()[1] for row in rows] == ["原生", "原生", "模拟"]
    assert [columns(row) for row in rows] == [columns(header)] * 3
    figure, first, _ = last_lines(done.stdout, 3)
    assert (figure, first.partition("：")[0]) == ("图：d/demo.png", "接下来")
    assert "训练" in done.stderr
    assert "precision auto took" not in done.stderr


def test_it_prints_no_noise(config, halfstep, fakes):
    fakes(Here)
    done = halfstep("demo", "--config", config, "--max-steps", 1, "--precisions", "fp32")
    text = done.stdout.split("precision ", 1)[1] + done.stderr  # after what the run printed
    for noise in ("native:", "hash", "too short to judge", "applied,"):
        assert noise not in text
    assert len(done.stderr.splitlines()) < 4, done.stderr


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("bf16-module", "bf16-mixed"),
        ("tf32", "cannot be honoured"),
        ("fp16-pure", "eps"),
        ("bf16-mixed,keep_fp32=nothing*", "matches no module"),
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


def test_data_is_prepared_before_the_first_run(config, halfstep, fakes, tmp_path):
    """Or the first run's peak memory and its seconds would be those of the preparation."""
    seen = []

    class Look(Here):
        def __init__(self, command, **more):
            super().__init__(command, **more)
            seen.append(len([*(tmp_path / "cache").rglob("tokens.bin")]))

    fakes(Look)
    halfstep("demo", "--config", config, "--max-steps", 1, "--precisions", "fp32", "bf16-mixed")
    assert seen == [2, 2]  # training and validation


def test_what_is_compared_where_none_is_named(config, halfstep, fakes, cpu):
    started = []

    class Broken(Here):
        def __init__(self, command, **more):
            super().__init__(command, **more)
            started.append(next(w for w in command if "precision=" in w).partition("=")[2])

        def wait(self, timeout=None):
            return 0 if started[-1] != "fp16-mixed" else 7

    def side(folder, precision, *_):
        return demo.Side(precision=precision, simulated=False, steps=[1], losses=[1.0],
                         val_loss=1.0, rate=1.0, quartiles=(1.0, 1.0), peak_bytes=1, skipped=0,
                         seconds=1.0)  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_side", side)
        fakes(Broken)
        cpu("bf16")
        done = halfstep("demo", "--config", config)
        assert started == ["fp32", "bf16-mixed", "fp16-mixed"]
        assert done.returncode == 7  # that of the run
        assert "precision auto took bf16-mixed" in done.stderr
        started.clear()
        cpu("avx2")
        assert halfstep("demo", "--config", config).returncode == 7
        assert started == ["fp32", "fp16-mixed"]


def test_a_configuration_of_another_task_is_refused(halfstep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = halfstep("demo", "--config", "classify-scratch")
    assert done.returncode == 2
    assert "trains language models" in done.stderr


@pytest.mark.parametrize("language", LANGUAGES)
def test_verdict_and_figure_are_in_the_language(config, halfstep, fakes, cpu, language, tmp_path):
    cpu("avx512_bf16")
    fakes(Here)
    done = halfstep("demo", "--config", config, "--max-steps", 2, "--lang", language,
                    "--precisions", "fp32", "bf16-mixed", "--output-dir", "d")  # fmt: skip
    assert {"en": "Beside fp32", "zh": "与 fp32 相比"}[language] in done.stdout
