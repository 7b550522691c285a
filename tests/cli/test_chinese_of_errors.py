"""The errors that a newcomer meets first are Chinese in Chinese, and not only in their frame."""

from __future__ import annotations

import pytest
import torch
from tests.test_words import SENTENCE

from halfstep.cli.main import main

ERRORS = [
    (["explain", "fp61-mixed"], "没有精度策略 'fp61-mixed'，是不是要写 'fp16-mixed'？"),
    (["explain", "nosuch"], "没有精度策略 'nosuch'。可用的有：fp32"),
    (["explain", "O1"], "NVIDIA apex 的级别：请写 'fp16-mixed'。"),
    (["explain", "nvfp4-nearest"], "请写 bf16-mixed,recipe=nvfp4-nearest。"),
    (["explain", "bf16-mixed,momenst=8bit"], "策略没有字段 'momenst'，是不是要写 'moments'？"),
    (["explain", "absent.toml"], "策略文件 absent.toml：无法读取："),
    (["explain", "policy.toml"], "策略文件 policy.toml：没有精度策略 'fp61'"),
    (["train", "--config", "nosuch"], "没有配置 'nosuch'；允许：classify-pretrained"),
    (["train", "--config", "absent.toml"], "配置文件 absent.toml：无法读取："),
    (["train", "--config", "broken.toml"], "配置文件 broken.toml：不是有效的 TOML："),
    (["train", "--config", "key.toml"], "没有键 learning_rat；允许：name"),
    (["train", "--config", "task.toml"], "键 task: 'nosuch'；允许：pretrain"),
    (["train", "--max-steps", "ten"], "配置 gpt-small-cpu: 键 run.max_steps: 'ten'；允许：整数"),
    (["train", "--max-steps", "0"], "run.max_steps=0；允许：整数 >= 1"),
    (["train", "--data", "absent.txt"], "absent.txt：没有这个文件或目录；请检查路径"),
    (["explain", "--device", "gpu"], "run.device='gpu'；允许：auto, cpu, mps, cuda, cuda:N"),
    (["explain", "--device", "cuda"], "torch 找到 0 个 CUDA 设备；请用 --device cpu"),
    (["explain", "--device", "mps"], "torch 没有找到 Mac 的 GPU；请用 --device cpu"),
    (["estimate", "--params", "many"], "--params 'many'；允许：不小于 1 的数"),
    (["memory", "absent"], "absent 里没有运行（缺少 config.toml）；请给出一个运行目录"),
    (["train", "--resume", "--output-dir", "absent"], "absent 里没有运行"),
    (["finetune", "lm"], "请用 --model 给出要微调的模型"),
    (["finetune", "classify"], "请用 --train 给出带文本和标签的文件"),
    (["finetune", "classify", "--train", "a.txt"], "不能来自 .txt；请转换格式或改名"),
]  # fmt: skip
FILES = {
    "policy.toml": 'base = "fp61"\n',
    "broken.toml": "x = = 2\n",
    "key.toml": "learning_rat = 3\n",
    "task.toml": 'task = "nosuch"\n',
    "a.txt": "some text\n",
}


@pytest.mark.parametrize(("words", "says"), ERRORS, ids=lambda value: " ".join(value)[:40])
def test_an_error_is_told_in_chinese(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert main([*words, "--lang", "zh"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    if "无法读取" not in says and "TOML" not in says:  # these end in the system's own words
        listed = line.partition("可用的有")[0].partition("允许")[0].partition("这里的列")[0]
        assert not SENTENCE.search(listed.replace(".csv, .tsv, .jsonl, .json, ", "")), line
