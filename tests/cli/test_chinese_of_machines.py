"""What the commands about machines, memory and formats print by ``--lang zh``: Chinese alone."""

from __future__ import annotations

import json
import re

import pytest
import torch

from halfstep.cli.formats import table
from halfstep.cli.main import main
from halfstep.diagnostics.scripts.rules import RULES
from halfstep.precision.policy import devices, probe
from halfstep.precision.policy.devices import DEVICES, choose
from halfstep.shown import columns
from halfstep.trainer.config.config import config_to_toml
from halfstep.trainer.doctor import machine
from halfstep.trainer.doctor.machine import diagnose
from halfstep.trainer.doctor.runs import RUN_RULES, changed
from halfstep.words import Phrase, said
from trainer.runs import small_config
from trainer.test_doctor_runs import healthy

CJK = re.compile(r"[\u4e00-\u9fff]")
SENTENCE = re.compile(r"(?:[A-Za-z]+[ ,;]+){2,}[A-Za-z]+")
# Titles of books, which are cited as they are, commands and numbers.
TITLES = re.compile(
    "|".join(
        re.escape(title)
        for row in DEVICES if not isinstance(row.source, Phrase)
        for title in row.source.split("; ")
    ) + r"|halfstep formats VALUE( VALUE \.\.\.)?|halfstep demo|\b(inf|nan)\b"
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Rates without measuring, and a machine without neighbours."""
    rate = "halfstep.trainer.environment.gemm_flops_per_second"
    monkeypatch.setattr(rate, lambda *_, **__: 4e9)
    monkeypatch.setattr(machine, "waiting_for_cores", lambda: 0.5)
    for name in ("probe", "remark"):
        monkeypatch.setattr(f"halfstep.cli.env.{name}", {"probe": lambda: 0.0, "remark": no}[name])


def no(*_) -> str:
    return ""


def require_chinese(text: str) -> None:
    assert CJK.search(text), text
    found = SENTENCE.search(TITLES.sub("", text).replace(devices.cpu_name(), ""))
    assert not found, found and found[0]
    assert "{" not in text


def printed(capsys, *words, code=0) -> str:
    assert main(["--lang", "zh", *words]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


COMMANDS = [
    "doctor",
    "doctor --shapes 64x64x64",
    "doctor --device V100 T4 A100 H100 mps cpu",
    "env",
    "estimate --params 1.3B",
    "estimate --config gpt-tiny --parallel shard=2",
    "formats",
    *(f"formats {value}" for value in ("0.1", "1e-8", "1e-300", "500", "1e39", "nan")),
    *(f"formats 0.1 6 --block {name}" for name in ("fp8", "fp8-block", "mxfp8", "nvfp4")),
]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_speaks_chinese(line, capsys):
    require_chinese(printed(capsys, *line.split()))


@pytest.mark.parametrize("row", DEVICES, ids=lambda row: row.family)
def test_a_device_is_described_in_chinese(row, capsys):
    require_chinese(printed(capsys, "doctor", "--device", row.examples[0]))


def test_the_locale_is_enough(capsys, monkeypatch):
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    monkeypatch.delenv("LANGUAGE", raising=False)
    assert main(["estimate", "--params", "1.3B"]) == 0
    require_chinese(capsys.readouterr().out)


def test_mistakes_in_scripts(tmp_path, capsys):
    for rule in RULES:
        (tmp_path / f"{rule.name}.py").write_text(rule.bad)
    paths = [str(path) for path in sorted(tmp_path.glob("*.py"))]
    out = printed(capsys, "doctor", *paths, code=3)
    require_chinese(out)
    assert len(out.splitlines()) == 3 * len(RULES)
    for first, why, instead in zip(*[iter(out.splitlines())] * 3, strict=True):
        # an editor goes to path:line:
        assert re.match(r"\S+\.py:\d+: ", first)
        assert CJK.search(first)
        assert CJK.search(why)
        assert instead.startswith("    改法：")
    (tmp_path / "good.py").write_text(RULES[0].good)
    require_chinese(printed(capsys, "doctor", str(tmp_path / "good.py")))


@pytest.mark.parametrize("rule", RUN_RULES, ids=lambda rule: rule.name)
def test_mistakes_in_runs(rule):
    found = rule.find(changed(healthy(), rule.bad))
    for text in (found.what, rule.why):
        require_chinese(said(text, "zh"))
        assert not CJK.search(text)
    assert not SENTENCE.search(said(rule.instead, "zh"))


def test_a_run_and_its_memory(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    config = tmp_path / "tiny.toml"
    config.write_text(config_to_toml(small_config(str(text))))
    path = str(tmp_path / "r")
    words = ["train", "--config", str(config), "--device", "cpu", "--max-steps", "2", "--quiet"]
    assert main([*words, "--precision", "bf16-mixed", "--output-dir", path]) == 0
    capsys.readouterr()
    require_chinese(printed(capsys, "doctor", path))
    require_chinese(printed(capsys, "memory", path))
    kept = json.loads((tmp_path / "r" / "env.json").read_text())
    assert not CJK.search(json.dumps(kept, ensure_ascii=False))


def test_what_a_probe_finds_is_told(monkeypatch):
    """A Mac whose fp16 is wrong, a torch without kernels for the GPU, slow products."""
    monkeypatch.setattr(probe, "_PROBES", (lambda x, w: x @ w * (1 + (x.dtype != torch.float64)),))
    probe._PROBES[0].__name__ = "_large_sum"
    wrong = probe.failed_probe.__wrapped__(torch.device("cpu"), torch.float16)
    assert wrong.startswith("large sum: its result is off by ")
    require_chinese(said(wrong, "zh"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(devices, "failed_probe", lambda device, dtype: wrong)
    chosen = choose(torch.device("mps"))
    assert wrong in chosen.reason
    require_chinese(said(chosen.reason, "zh"))


def test_notes_on_a_machine(monkeypatch):
    flags = frozenset({"amx_bf16"})
    monkeypatch.setattr(devices, "cpu_instructions", lambda: flags)
    monkeypatch.setattr("halfstep.precision.casting.autocast.cpu_has_bf16", lambda: False)
    monkeypatch.setattr(machine, "failed_probe", lambda device, dtype: "x")
    rates = {"fp32": 4e9, "bf16-mixed": 1e9}
    monkeypatch.setattr(
        "halfstep.trainer.environment.gemm_flops_per_second",
        lambda policy, *_, **__: rates.get(str(policy), 1e9),
    )
    found = diagnose(torch.device("cpu"))
    assert found.product_times == 4
    assert len(found.notes) == 4  # a wrong probe, slow products, a busy machine, simulated
    for note in found.notes:
        require_chinese(said(note, "zh"))
        assert not CJK.search(note)


JSON = [
    "doctor --device T4 A100", "doctor", "estimate --params 1.3B", "formats 1e-8",
    "formats 0.1 --block nvfp4", "env", "formats",
]  # fmt: skip


@pytest.mark.parametrize("line", JSON)
def test_json_is_the_same_in_every_language(line, capsys):
    found = []
    for language in ("en", "zh"):
        assert main(["--lang", language, *line.split(), "--json"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]


def test_errors_stay_english_in_a_chinese_frame(capsys):
    assert main(["--lang", "zh", "doctor", "--device", "Voodoo"]) == 2
    said_of_it = capsys.readouterr().err
    assert said_of_it.startswith("halfstep：错误：")
    assert "is not in halfstep's table of devices" in said_of_it


def test_the_columns_of_a_table_stand_in_line():
    lines = table([("精度策略", "最大批次"), ("fp32", "25"), ("权重", "-")], {1}).splitlines()
    assert lines == ["精度策略  最大批次", "fp32            25", "权重             -"]
    assert {columns(line) for line in lines} == {18}
