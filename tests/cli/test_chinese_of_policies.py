"""explain, trace, replay by ``--lang zh``: no English sentence, tables aligned."""

from __future__ import annotations

import json
import re

import pytest
import torch

from halfstep.cli.main import main
from halfstep.diagnostics.nonfinite.cause import CHANGES, Cause, Operand
from halfstep.precision.policy.policy import POLICIES, RECIPES
from halfstep.words import said, speaking

SENTENCE = re.compile(r"(?<![\w./-])[A-Za-z']{2,}(?: [A-Za-z']{2,}){2,}(?![\w(])")
"""Three words or more with blanks between them, none of which has a digit or a dot."""
ALLOWED = ("halfstep explain POLICY",)


def english(text: str) -> list[str]:
    """The English sentences in a text."""
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    return SENTENCE.findall(text)


def braces(text: str) -> list[str]:
    return re.findall(r"\{\w*\}", text)


def told(capsys, *words: str, code: int = 0) -> tuple[str, str]:
    """What a command prints in Chinese; checks that it is no English."""
    capsys.readouterr()
    assert main([*words, "--lang", "zh"]) == code
    out, err = capsys.readouterr()
    assert english(out + err) == [], words
    assert braces(out + err) == [], words
    return out, err


def columns_of(text: str) -> int:
    """Columns of a terminal: Chinese signs and their punctuation take two."""
    return len(text) + len(re.findall("[\u3000-\u303f\u4e00-\u9fff\uff00-\uff60]", text))


def columns(line: str, mark: str) -> int:
    """In which column of a terminal a word begins."""
    return columns_of(line[: line.index(mark)])


def test_sentences_are_recognised():
    assert english("cpu      模拟     bf16 products run through fp32 kernels") == [
        "products run through"
    ]
    assert english("layers.0.attn.qkv   Linear   前向  fp32, bf16，halfstep train --config") == []


def test_explain(capsys):
    out, _ = told(capsys, "explain", "--device", "cpu")
    lines = out.splitlines()
    assert lines[1].startswith("fp32         32, 32-true")
    assert columns(lines[0], "损失缩放") == columns(lines[1], "none")
    assert "拒绝：CPU 没有 fp8 矩阵乘" in out
    names = [*POLICIES, *RECIPES, "bf16-split,moments=8bit", "bf16-master,moments=bf16"]
    names += ["fp16-mixed,scale=static", "bf16-mixed,keep_fp32=*.norm"]
    names.append("bf16-mixed,recipe=mxfp8-e5m2/bf16/nvfp4-nearest,simulate=yes")
    out, _ = told(capsys, "explain", *names, "--device", "cpu", "--simulate")
    assert "params   fp32     优化器直接更新的那一份" in out
    for line in out.splitlines():
        if line.startswith(("字节", "scale")):
            assert columns(line, line.split()[1]) == 9


def test_explain_a_model(capsys):
    out, _ = told(capsys, "explain", "--config", "gpt-tiny", "--device", "cpu")
    head, first = out.partition("\n\n")[2].splitlines()[:2]
    assert columns(head, "权重格式") == columns(first, "fp32")
    assert columns_of(head) == columns_of(first)


def test_a_policy_that_is_refused(capsys, settings):
    _, err = told(capsys, "trace", *settings, "--precision", "fp8", code=2)
    assert "精度策略 fp8 无法在 cpu 上执行：CPU 没有 fp8 矩阵乘" in err


def test_trace(capsys, settings, tmp_path):
    golden = str(tmp_path / "golden.json")
    out, _ = told(capsys, "trace", *settings, "--save", golden)
    assert out.splitlines()[-1] == "所有算子都按 bf16-mixed 的规定执行"
    head, first = out.splitlines()[:2]
    assert columns(head, "方向") == columns(first, "前向")
    assert columns_of(head) == columns_of(first)
    main(["trace", *settings, "--json", "--lang", "zh"])
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "golden.json").read_text())


def test_a_stopped_run_its_report_and_its_replay(capsys, settings, tmp_path):
    path = tmp_path / "run"
    rates = ["--learning-rate", "1000", "--max-steps", "20", "--precision", "fp16-mixed"]
    words = ["train", *settings, *rates, "--output-dir", str(path), "--capture", "1"]
    _, err = told(capsys, *words, code=3)
    assert "最初的原因：" in err
    assert "可以试试：halfstep train" in err
    (line,) = [json.loads(text) for text in (path / "causes.jsonl").read_text().splitlines()]
    cause = Cause.from_json(line)
    assert line["text"] == str(cause)
    assert line["remedy"] == cause.remedy
    assert english(line["text"])
    last = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["first_cause"] == cause.summary
    told(capsys, "report", str(path), "--out", str(tmp_path / "report.md"))
    text = (tmp_path / "report.md").read_text()
    assert english(text.replace("\\", "")) == []
    with speaking("zh"):
        assert said(cause.remedy) in text.replace("\\", "")


@pytest.mark.parametrize("name", CHANGES)
def test_every_class_of_causes(name):
    broken = Operand("mat1 = weight", torch.float16, 60000.0, 1, 2, "parameter")
    number = Operand("other", None, 2.0, 0, 0, "number")
    cause = Cause(
        kind="overflow", op="aten.mul.Tensor", module="a", class_name="Linear", block="b",
        direction="backward", dtype=torch.float16, nan=1, inf=2, elements=4,
        inputs=(broken, number), node="MulBackward0", source="x.py:3", cause_class=name,
        micro_batch=1, micro_batches=2,
    )  # fmt: skip
    with speaking("zh"):
        texts = [said(text) for text in (str(cause), cause.summary, cause.remedy)]
    assert [english(text) for text in texts] == [[], [], []]
    assert [braces(text) for text in texts] == [[], [], []]
    assert all(re.search("[\u4e00-\u9fff]", text) for text in texts)
    read = Cause.from_json(json.loads(json.dumps({**cause.to_json(), "more": 1})))
    assert read == cause
    assert Cause.from_json({**cause.to_json(), "elements": 0}) is None
    assert Cause.from_json({}) is None
