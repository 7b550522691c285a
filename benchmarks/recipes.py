"""Which recipe below 16 bits? A small GPT trained with each, over seeds, on the same batches.

    python benchmarks/recipes.py [--data FILE] [--name NAME] [--steps 1500] [--seeds 1 2 3 ...]

Text is read as bytes, by default that of the standard library; the last tenth is for validation.
All recipes of a seed start from the same weights and see the same batches. First one batch says
which layers and products are sensitive: the fp32 gradient after 100 fp32 steps is the truth, and
each layer's product alone is put into NVFP4. The most sensitive block is the one that ``nvfp4, one
block kept`` keeps in bf16; ``nvfp4, last block kept`` follows the field's rule. Each finished run
is written at once, so that a run of this file that was killed goes on where it was.
`benchmarks/recipes_figures.py` judges and draws the files.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import RESULTS
from halfstep.files import write_whole
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision
from halfstep.trainer.config.config import load_config
from halfstep.trainer.data.corpus import standard_library
from halfstep.trainer.environment import environment, keep_freed_memory
from halfstep.trainer.models.gpt import GPT
from halfstep.trainer.step import make_optimizer

KEPT, LAST = "nvfp4, one block kept", "nvfp4, last block kept"
POLICIES = {
    "fp32": "fp32",
    "bf16-mixed": "bf16-mixed",
    "mxfp8": "mxfp8,simulate=yes",
    "nvfp4": "nvfp4,simulate=yes",
    "nvfp4-nearest": "bf16-mixed,recipe=nvfp4-nearest,simulate=yes",
    "nvfp4-unmixed": "bf16-mixed,recipe=nvfp4-unmixed,simulate=yes",
    KEPT: "nvfp4,simulate=yes,keep_bf16=layers.{block}*",
    LAST: "nvfp4,simulate=yes,keep_bf16=layers.{last}*",
}
JUDGED = ("bf16-mixed", "mxfp8-e5m2", "fp8", "mxfp8", "nvfp4", "nvfp4-nearest",
          "nvfp4-unmixed")  # fmt: skip
LINEARS = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")
SHAPE = {"n_layer": 3, "n_head": 4, "n_embd": 64, "block_size": 64, "vocab_size": 256}
ROWS, EVERY, RATE, WARMUP = 8, 25, 3e-3, 50

Batch = tuple[Tensor, Tensor]


class Text:
    """The bytes of files: random rows of their first nine tenths, fixed rows of their last."""

    def __init__(self, *paths: Path) -> None:
        joined = bytearray(b"".join(path.read_bytes() for path in paths))
        data = torch.frombuffer(joined, dtype=torch.uint8).long()
        cut = len(data) * 9 // 10
        self.train, self.held = data[:cut], data[cut:]

    def rows(self, data: Tensor, count: int, generator: torch.Generator) -> Batch:
        """Draw rows of tokens and of the tokens that follow them."""
        length = SHAPE["block_size"]
        starts = torch.randint(len(data) - length, (count, 1), generator=generator)
        rows = data[starts + torch.arange(length + 1)]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def validation(self, count: int = 2) -> list[Batch]:
        """Draw the rows on which every run is judged."""
        generator = torch.Generator().manual_seed(0)
        return [self.rows(self.held, 128, generator) for _ in range(count)]


def start(policy: str, seed: int) -> tuple[GPT, Precision]:
    """A new model with its optimizer, under a policy."""
    overrides: list[tuple[str, Any]] = [(f"model.{key}", value) for key, value in SHAPE.items()]
    config = load_config("gpt-tiny", overrides)
    model = GPT(config.model, seed=seed)
    parsed = parse_policy(policy)
    return model, Precision(parsed, model, make_optimizer(model, config.optimizer, parsed))


def loss_of(model: GPT, precision: Precision, batch: Batch) -> Tensor:
    with precision.autocast():
        total, _ = model.loss_sum(batch)
        return total / batch[1].numel()


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    along = max(0, step - WARMUP) / (steps - WARMUP)
    return RATE * min(1, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * along))


def train(policy: str, seed: int, text: Text, steps: int, total: int, every: int = EVERY):
    """Train ``steps`` of a schedule of ``total``; the model, its precision and what was seen."""
    model, precision = start(policy, seed)
    generator, validation = torch.Generator().manual_seed(seed), text.validation()
    curve, skipped, begin = [], 0, time.perf_counter()
    for step in range(steps):
        for group in precision.optimizers[0].param_groups:
            group["lr"] = rate(step, total)
        batch = text.rows(text.train, ROWS, generator)
        result = precision.step(loss_of(model, precision, batch), max_norm=1.0)
        skipped += not result.applied
        if every and (step + 1) % every == 0:
            with torch.no_grad():
                seen = [float(loss_of(model, precision, one)) for one in validation]
            curve.append((step + 1, sum(seen) / len(seen)))
    spent = time.perf_counter() - begin
    return model, precision, {"validation": curve, "skipped": skipped, "seconds": spent}


def gradient(policy: str, state: dict[str, Tensor], batch: Batch) -> Tensor:
    """The gradients of a model's blocks under a policy, as one fp64 vector."""
    model, precision = start(policy, 0)
    model.load_state_dict(state)
    precision.backward(loss_of(model, precision, batch))
    named = model.named_parameters()
    return torch.cat([p.grad.double().flatten() for name, p in named if "layers" in name])


def error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def sensitivity(text: Text) -> dict[str, Any]:
    """How far one batch's gradient is off: by recipe, and by layer and product in NVFP4."""
    model, *_ = train("fp32", 0, text, 100, 500, every=0)
    state = model.state_dict()
    batch = text.rows(text.train, 32, torch.Generator().manual_seed(10))
    truth = gradient("fp32", state, batch)
    by_recipe = {}
    for name in JUDGED:
        policy = POLICIES.get(name, f"bf16-mixed,recipe={name},simulate=yes")
        by_recipe[name] = error(gradient(policy, state, batch), truth)
    by_layer = {}
    for block in range(SHAPE["n_layer"]):
        for linear in LINEARS:
            layer = f"layers.{block}.{linear}"
            for product, recipe in (("fprop", "nvfp4/bf16/bf16"), ("dgrad", "bf16/nvfp4/bf16"),
                                    ("wgrad", "bf16/bf16/nvfp4"), ("all", "nvfp4")):  # fmt: skip
                policy = f"bf16-mixed,rules={layer}:{recipe},simulate=yes"
                found = gradient(policy, state, batch)
                by_layer[f"{layer}/{product}"] = error(found, truth)
    blocks = [
        math.sqrt(sum(by_layer[f"layers.{b}.{linear}/all"] ** 2 for linear in LINEARS))
        for b in range(SHAPE["n_layer"])
    ]
    return {"by_recipe": by_recipe, "by_layer": by_layer, "by_block": blocks,
            "most_sensitive": blocks.index(max(blocks))}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="by default the standard library")
    parser.add_argument("--name", help="of the result; by default that of the data")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--policies", nargs="+", default=[*POLICIES], choices=[*POLICIES])
    arguments = parser.parse_args()
    keep_freed_memory()
    data = arguments.data or Path("standard-library")
    text = (
        Text(arguments.data)
        if arguments.data
        else Text(*(source.path for source in standard_library()))
    )
    path = RESULTS / f"recipes-{arguments.name or data.stem}.json"
    setting = {"benchmark": "recipes", "data": data.name, "steps": arguments.steps,
               "shape": SHAPE, "rows": ROWS, "learning_rate": RATE}  # fmt: skip
    content = json.loads(path.read_text()) if path.exists() else dict(setting)
    if any(content.get(key) != value for key, value in setting.items()):
        raise SystemExit(f"{path} has another setting; give another --name, or remove it")
    content.setdefault("machine", environment(torch.device("cpu")))
    if "sensitivity" not in content:
        content["sensitivity"] = sensitivity(text)
        write_whole(path, json.dumps(content) + "\n")
    block = content["sensitivity"]["most_sensitive"]
    runs = content.setdefault("runs", {})
    for seed in arguments.seeds:
        for name in arguments.policies:
            key = f"{name}/{seed}"
            if key in runs:
                continue
            policy = POLICIES[name].format(block=block, last=SHAPE["n_layer"] - 1)
            *_, seen = train(policy, seed, text, arguments.steps, arguments.steps)
            runs[key] = {"policy": policy, **seen}
            write_whole(path, json.dumps(content) + "\n")
            print(f"{key:28} {seen['validation'][-1][1]:.4f}  {seen['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
