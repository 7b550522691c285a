"""``halfstep doctor`` about the machine that it runs on."""

import json

import torch

from halfstep.cli.main import main

CPU = torch.device("cpu")


def test_json(capsys):
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["device"] == "cpu"
