"""The command halfstep advise: from a configuration to a policy file."""

from __future__ import annotations

import json

import pytest

from halfstep.cli.main import main
from halfstep.precision.policy.spelling import parse_policy


@pytest.fixture
def settings(settings):
    return [*settings, "--batches", "4"]


def test_advice_is_proved_and_written_and_read_again(settings, tmp_path, capsys):
    out = tmp_path / "policy.toml"
    words = [*settings, "--steps", "8", "--tolerance", "50%", "--out", str(out)]
    assert main(["advise", *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith("proved: ")
    assert f"Written: {out}" in said
    text = out.read_text()
    assert text.startswith("# proved: ")
    assert parse_policy(str(out)).recipes()


def test_without_a_run_it_is_unproved_and_the_exit_code_says_so(settings, capsys):
    assert main(["advise", *settings, "--steps", "0", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["proved"] is False
    assert found["floor"] is None
    assert parse_policy(found["policy"]).recipes()


def test_mistakes_are_refused(settings, tmp_path, capsys):
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    rates = tmp_path / "rates.toml"
    rates.write_text("bf16 = 700\nmxfp8 = 1200\n")
    for words, message in (
        (["--tolerance", "much"], "--tolerance much; allowed: such as 0.3%"),
        (["--out", "policy.json"], "allowed: a file .toml"),
        (["--out", str(folder)], "allowed: a file .toml in a folder that can be written"),
        (["--batches", "0"], "--batches 0; allowed: 1 and more"),
        (["--rates", "h100"], "formats mxfp8, nvfp4 have no rate: h100 does not multiply them"),
        (["--rates", "absent.toml"], "--rates absent.toml: "),
        (["--rates", str(rates)], "formats nvfp4 have no rate: none is given"),
        (["--formats", "bf16,nvpf4"], "allowed: bf16 and then"),
        (["--steps", "8", "--tolerance", "0.0000001%"], "lies under the noise floor"),
    ):
        assert main(["advise", *settings, *words]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    assert main(["advise", str(tmp_path / "run")]) == 2
    assert "no config.toml" in capsys.readouterr().err
