"""Launches, bytes, copies and synchronisations of a training step on CUDA; they may only fall.

``budget.toml`` holds them for small models: a row's name is the model, the policy, whose AdamW
steps, and the step if it is a special one. Whoever takes something away lowers them::

    python tests/launches/test_launches.py --write      # refuses to raise one: done by hand
    python tests/launches/test_launches.py --gpt2       # shows those of GPT-2, 124 M parameters
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
BUDGET = HERE / "budget.toml"
SPLIT8 = "bf16-split,moments=8bit"
ROWS = [
    *(f"gpt {policy} {whose}" for policy in ("bf16-mixed", "fp16-mixed", "bf16-master")
      for whose in ("torch", "halfstep")),
    *(f"gpt {policy} halfstep" for policy in ("fp8", "bf16-split", SPLIT8)),
    f"gpt {SPLIT8} halfstep check",
    *(f"encoder {policy} halfstep" for policy in ("fp32", "bf16-mixed", "bf16-split")),
    *(f"linear {policy} halfstep" for policy in ("bf16-mixed", "fp8")),
]  # fmt: skip
QUICK = ["gpt bf16-mixed torch", f"gpt {SPLIT8} halfstep check"]
SMALL, GPT2 = (2, 64, 4, 512, 4, 32), (12, 768, 12, 50304, 16, 1024)
"""Layers, width, heads, vocabulary, rows, tokens."""
Figures = dict[str, dict[str, int]]


def figures(size: str, rows: list[str]) -> Figures:
    """Count in a process of its own, whose torch is loaded after the library."""
    torch = Path(str(find_spec("torch").origin)).parent  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/fake_cuda.so"
        paths = f"-I{torch}/include", f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"
        links = "-lc10", "-ltorch_cpu", "-o", library
        command = ["g++", "-std=c++20", "-shared", "-fPIC", *paths, str(HERE / "fake_cuda.cpp")]
        subprocess.run([*command, *links], check=True, timeout=120)
        environment = os.environ | {"LD_PRELOAD": library, "HALFSTEP_KERNEL": ""}
        environment["CUDA_VISIBLE_DEVICES"] = ""  # no real one comes in between
        program = [sys.executable, "-W", "ignore", __file__, "--count", size, *rows]
        done = subprocess.run(program, env=environment, stdout=subprocess.PIPE, timeout=600)
    done.check_returncode()
    return dict(json.loads(line) for line in done.stdout.splitlines())


# --- what the process of its own runs ---


def gpt(*sizes: int) -> tuple[Any, Callable[[], Any]]:
    """halfstep's GPT and a call that gives its loss."""
    import torch

    from halfstep.trainer.models.gpt import GPT, GPTConfig

    layers, width, heads, vocabulary, rows, tokens = sizes
    model = GPT(GPTConfig(n_layer=layers, n_head=heads, n_embd=width, block_size=tokens,
                          vocab_size=vocabulary))  # fmt: skip
    ids = torch.randint(vocabulary, (rows, tokens))

    def loss() -> Any:
        total, count = model.loss_sum((ids, ids))
        return total / count

    return model, loss


def encoder(*sizes: int) -> tuple[Any, Callable[[], Any]]:
    """Layers like BERT's that are tuned to classify, and a call that gives the loss."""
    import torch
    from torch import nn

    layers, width, heads, vocabulary, rows, tokens = sizes
    each = [nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
            for _ in range(layers)]  # fmt: skip
    model = nn.Sequential(nn.Embedding(vocabulary, width), *each, nn.Linear(width, 2))
    ids, labels = torch.randint(vocabulary, (rows, tokens)), torch.randint(2, (rows,))
    return model, lambda: nn.functional.cross_entropy(model(ids)[:, 0], labels)


def linear(*_: int) -> tuple[Any, Callable[[], Any]]:
    """One layer that is wide enough for fp8, and a call that gives a loss."""
    import torch

    model, x = torch.nn.Linear(4096, 4096), torch.randn(16384, 4096).bfloat16().requires_grad_()
    return model, lambda: model(x).square().mean()


def count(row: str, sizes: tuple[int, ...]) -> dict[str, int]:
    """Take a row's steps on fake tensors, and count the last one."""
    import fake_cuda
    import torch

    import halfstep

    name, policy, whose, *check = row.split()
    with fake_cuda.Count() as counted:
        with torch.device("cuda"):
            model, loss = {"gpt": gpt, "encoder": encoder, "linear": linear}[name](*sizes)
        adamw = halfstep.optim.AdamW if whose == "halfstep" else torch.optim.AdamW
        options = {} if whose == "halfstep" else {"fused": True}
        optimizer = adamw(model.parameters(), lr=1e-3, **options)  # type: ignore[arg-type]
        precision = halfstep.Precision(policy, model, optimizer)
        for _ in range(8 if check else 3):  # 8-bit moments are checked in the eighth
            counted.clear()
            with precision.autocast():
                found = loss()
            precision.step(found, max_norm=1.0)
    sys.stderr.write(f"{row}: waits at {dict(counted.waits)}\n")
    return counted.figures()


def main(words: list[str]) -> int:
    """Lower the budget, or show the figures of GPT-2."""
    if words[:1] == ["--count"]:
        sys.path.insert(0, str(HERE))
        import fake_cuda

        fake_cuda.install()
        for row in words[2:]:
            sizes = GPT2 if words[1] == "gpt2" else SMALL
            sys.stdout.write(json.dumps([row, count(row, sizes)]) + "\n")
        return 0
    if words == ["--gpt2"]:
        for row, found in figures("gpt2", [row for row in ROWS if row.startswith("gpt")]).items():
            sys.stdout.write(f"{row:45} {found}\n")
        return 0
    if words != ["--write"]:
        sys.stderr.write("usage: python tests/launches/test_launches.py --write | --gpt2\n")
        return 2
    found = figures("small", ROWS)
    if up := risen(found, read()):
        sys.stderr.write("\n".join(["not written, since figures have risen:", *up, ""]))
        return 1
    text = "# Of a training step on CUDA; they may fall, and rise only in a commit that says why.\n"
    text += "# python tests/launches/test_launches.py --write lowers them to the tree's.\n\n"
    for row, values in found.items():
        pairs = ", ".join(f"{name} = {number}" for name, number in values.items())
        text += f'"{row}" = {{ {pairs} }}\n'
    BUDGET.write_text(text, encoding="utf-8")
    return 0


# --- the budget ---


def read() -> Figures:
    """Read the figures that hold."""
    return tomllib.loads(BUDGET.read_text(encoding="utf-8")) if BUDGET.exists() else {}


def risen(found: Figures, budget: Figures) -> list[str]:
    """Name every figure that is above its budget."""
    return [
        f"{row}: {number:,} {name}, above {allowed:,}"
        for row, values in found.items()
        for name, number in values.items()
        if number > (allowed := budget.get(row, {}).get(name, number))
    ]


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="needs g++ on Linux")
@pytest.mark.parametrize("rows", [QUICK, pytest.param(ROWS, marks=pytest.mark.slow, id="all")])
def test_no_figure_of_a_step_has_risen(rows):
    pytest.importorskip("triton", reason="NO TRITON: nothing of the CUDA path was counted")
    found, budget = figures("small", rows), read()
    assert found.keys() == {*rows}
    assert all(row["launches"] > 20 for row in found.values()), "nothing rises where none counts"
    assert not risen(found, budget)
    assert set(ROWS) == budget.keys()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
