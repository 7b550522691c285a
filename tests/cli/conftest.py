"""Commands in the tests' own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from halfstep.cli import train
from halfstep.cli.main import main
from halfstep.trainer.config.config import config_to_toml
from trainer.runs import small_config


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def halfstep(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Done]]:
    """Runs a command on one thread, without the benchmark of products, in this environment."""
    monkeypatch.setattr(train, "keep_freed_memory", lambda **_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def call(*words: object, **environment: str) -> Done:
        capsys.readouterr()
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return Done(main([*map(str, words)]), *capsys.readouterr())

    yield call
    torch.set_num_threads(threads)


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """Options of a command that takes a step: a small model, a text and the CPU."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    config = tmp_path / "tiny.toml"
    config.write_text(config_to_toml(small_config("elsewhere.txt")))
    return ["--config", str(config), "--data", str(text), "--device", "cpu"]
