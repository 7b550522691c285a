"""An Accelerate loop in fp16 with halfstep's loss scaler: two changed lines, marked.

A bag of words learns which standard-library package a docstring comes from. The loss scale starts
far too high on purpose, so the first steps overflow. They are skipped, Accelerate notices although
the optimizer is fused, and the learning-rate schedule waits.

Run: python examples/accelerate_loop.py
     torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import ast
import re
import sysconfig
import zlib
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from halfstep.integrations.accelerate import attach  # 1

PACKAGES = ("asyncio", "email", "http", "logging", "tkinter", "xml")
WORDS, LENGTH, BATCH, EPOCHS = 4096, 48, 32, 4


def docstrings(package: str) -> list[str]:
    """Collect the docstrings of a package's modules, classes and functions."""
    found = []
    for path in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
        if "test" not in str(path.relative_to(sysconfig.get_path("stdlib"))):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    found.append(ast.get_docstring(node) or "")
    return [text for text in found if len(text) > 40]


def examples() -> torch.utils.data.TensorDataset:
    """Turn a docstring into hashed words and the package's number."""
    rows, labels = [], []
    for label, package in enumerate(PACKAGES):
        for text in docstrings(package):
            words = [zlib.crc32(w.encode()) % WORDS for w in re.findall(r"[a-z]+", text.lower())]
            rows.append((words + [WORDS] * LENGTH)[:LENGTH])
            labels.append(label)
    return torch.utils.data.TensorDataset(torch.tensor(rows), torch.tensor(labels))


class Bag(nn.Module):
    """A small network over the mean of word vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, 64, padding_idx=WORDS)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, len(PACKAGES)))

    def forward(self, ids):
        """Compute a logit for each package."""
        return self.head(self.words(ids).mean(dim=1))


def main() -> list[float]:
    torch.manual_seed(0)
    on_cpu = not torch.cuda.is_available()
    accelerator = Accelerator(mixed_precision="no" if on_cpu else "fp16", cpu=on_cpu)
    scaler = attach(accelerator, init_scale=2.0**24)  # 2, before prepare
    data, model = examples(), Bag()
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, EPOCHS * len(loader))
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    losses = []
    for epoch in range(EPOCHS):
        for ids, labels in loader:
            # on a CPU Accelerate has no fp16, so the loop enters autocast itself
            with torch.autocast("cpu", torch.float16, enabled=on_cpu):
                logits = model(ids)
            loss = nn.functional.cross_entropy(logits.float(), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # of the unscaled gradients
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.optimizer_step_was_skipped:
                result = scaler.last_step
                accelerator.print(
                    f"step {len(losses)} skipped: {result.reason} in "
                    f"{', '.join(result.nonfinite_parameters)}; scale {result.loss_scale:g} -> "
                    f"{result.next_loss_scale:g}, learning rate still {schedule.get_last_lr()[0]:g}"
                )
        accelerator.print(
            f"epoch {epoch + 1}  loss {sum(losses[-len(loader) :]) / len(loader):.3f}  "
            f"scale {scaler.get_scale():g}  skipped {scaler.skipped_total}"
        )
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
