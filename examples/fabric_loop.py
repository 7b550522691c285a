"""A Fabric loop under a whole halfstep policy: three changed lines, marked.

The model predicts the next byte of the standard library's docstrings from the eight bytes before.

Run: python examples/fabric_loop.py [POLICY]
"""

import ast
import sys
import sysconfig
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

from halfstep.integrations.fabric import HalfstepPrecision
from halfstep.optim import AdamW

CONTEXT, STEPS, BATCH = 8, 300, 64


def text() -> torch.Tensor:
    """Return the bytes of the docstrings of ``asyncio``."""
    documented = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib"), "asyncio").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found.append(ast.get_docstring(node) if isinstance(node, documented) else None)
    return torch.tensor(list("\n".join(filter(None, found)).encode()))


def main(policy: str = "fp16-master") -> list[float]:
    torch.manual_seed(0)
    bytes_T = text()
    model = nn.Sequential(
        nn.Embedding(256, 24), nn.Flatten(), nn.Linear(CONTEXT * 24, 128), nn.GELU(),
        nn.Linear(128, 256),
    )  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=4e-3)
    precision = HalfstepPrecision(policy)
    fabric = Fabric(accelerator="cpu", plugins=[precision])  # 1: instead of precision="16-mixed"
    model, optimizer = precision.setup(fabric, model, optimizer)  # 2: instead of fabric.setup
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        starts = torch.randint(len(bytes_T) - CONTEXT, (BATCH, 1))
        rows_BT = bytes_T[starts + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(rows_BT[:, :-1]), rows_BT[:, -1])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        result = precision.last_step
        if result.applied:  # 3: the schedule holds on skipped steps
            schedule.step()
        losses.append(result.loss)
        if step % 60 == 0 or not result.applied:
            print(
                f"step {step:3}  loss {result.loss:.3f}  |g| {result.grad_norm:.3f}  scale "
                f"{result.loss_scale:g}  "
                f"{'applied' if result.applied else 'skipped: ' + str(result.reason)}"
            )
    print(f"{policy}: loss {sum(losses[-30:]) / 30:.3f}, {result.skipped_total} steps skipped")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
