"""Every command and option has its help, which keeps to the terminal and needs no torch."""

from __future__ import annotations

import re

from halfstep.cli.commands import COMMANDS
from halfstep.cli.main import main


def test_every_command_is_listed(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: halfstep")
    assert len(re.findall(r"^  [a-z]", text, re.MULTILINE)) == len(COMMANDS)


def test_defaults_are_those_of_the_configuration_that_a_command_starts_from(capsys):
    for command, told in (
        ("train", ("the end only. Default: 250.", "Default: bpe:8192.")),
        ("predict", ("'-', the default, is stdout", "Texts in one forward pass. Default: 64.")),
    ):  # fmt: skip
        assert main([command, "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        for each in told:
            assert each in text
        assert "Default: ." not in text
