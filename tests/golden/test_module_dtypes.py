"""One table of dtypes for CPU and CUDA: every module's parameters, inputs and outputs, observed.

``module_dtypes.json`` was observed on a CPU and read through by hand. CUDA's autocast runs other
operations in fp32 than CPU's; the rules here are what makes the two equal. To write it anew:
``PYTHONPATH=tests python -m golden.test_module_dtypes``.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from every import every
from halfstep import Precision, parse_policy
from halfstep.optim.optimizers import AdamW
from halfstep.precision.policy.policy import dtype_name
from halfstep.trainer.models.gpt import GPT, GPTConfig

TABLE = Path(__file__).with_name("module_dtypes.json")
POLICIES = ("bf16-mixed", "fp16-mixed", "bf16-master", "bf16-split")


class Encoder(nn.Module):
    """torch's own transformer encoder between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.encoder(self.embed(tokens))).mean(1))


class ConvNet(nn.Module):
    """Convolutions with batch norm, a residual sum and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        return self.head(self.pool(x + self.body(x)).mean((2, 3)))


def make(model: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    tokens = torch.arange(16).reshape(2, 8) % 11
    if model == "gpt":
        return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11)), tokens
    return (Encoder(), tokens) if model == "encoder" else (ConvNet(), torch.randn(2, 3, 8, 8))


RULES = {
    "gpt": "type:LayerNorm|layers.1.mlp",
    "encoder": "type:LayerNorm|head",
    "convnet": "type:BatchNorm2d|head",
}
CASES = [
    (model, policy)
    for model in RULES
    for policy in POLICIES
    if model != "convnet" or policy.endswith("mixed")
]


def dtypes(values: Any) -> str:
    found = [dtype_name(leaf.dtype) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return " ".join(found) or "-"


def observe(model_name: str, policy: str, device: torch.device) -> dict[str, str]:
    """What hooks see of one training step, as "parameters | inputs | outputs" by module."""
    model, batch = make(model_name)
    model = model.to(device)
    rules = parse_policy(f"{policy},keep_fp32={RULES[model_name]}")
    precision = Precision(rules, model, AdamW(model.parameters(), lr=1e-3, eps=1e-4))
    table = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            parts = [*module.parameters(recurse=False)], (args, kwargs), output
            table[name or "(model)"] = " | ".join(map(dtypes, parts))

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name), with_kwargs=True)
    with precision.autocast():
        loss = model(batch.to(device)).square().mean()
    assert precision.step(loss).reason in (None, "overflow")
    return dict(sorted(table.items()))


def check(model: str, policy: str, device: torch.device) -> None:
    expected = json.loads(TABLE.read_text())[f"{model} {policy}"]
    assert observe(model, policy, device) == expected


def test_dtypes_on_cpu():
    every(((*case, torch.device("cpu")) for case in CASES), check)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: nothing of CUDA was tested")
def test_dtypes_on_cuda_are_those_of_the_cpu():
    every(((*case, torch.device("cuda", 0)) for case in CASES), check)


if __name__ == "__main__":
    rows = {f"{m} {p}": observe(m, p, torch.device("cpu")) for m, p in CASES}
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")
