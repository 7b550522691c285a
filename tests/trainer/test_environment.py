"""``halfstep doctor`` about machines: the one it runs on, and those that are only named."""

import json

import pytest
import torch

from halfstep.cli.main import main
from halfstep.precision.policy.devices import DEVICES
from halfstep.trainer.environment import diagnose


@pytest.mark.parametrize("kind", DEVICES, ids=lambda kind: kind.family)
def test_a_named_device_is_answered_from_the_table(kind):
    found = diagnose(kind.examples[0])
    assert (found["family"], found["policy"]) == (kind.family, kind.policy)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "T4"], "take fp16-mixed: T4 (Turing) has tensor cores for fp16"),
        (["--device", "mps"], "take fp32: mps (Apple M)"),  # where there is no Mac
        (["--device", "T4", "A100"], "T4      fp16-mixed  T4 (Turing)"),
        ([], "take "),
    ],
)
def test_what_the_command_prints(capsys, words, said):
    assert main(["doctor", *words]) == 0
    assert said in capsys.readouterr().out


def test_json(capsys):
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["name"] == found["environment"]["cpu"]["name"]


def test_a_device_that_is_not_here(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--device", "cuda"]) == 2
    assert "cuda is not in halfstep's table" in capsys.readouterr().err
