"""A LightningModule under a whole halfstep policy: two changed lines in the Trainer, marked.

It learns which package of Python's standard library a docstring comes from. The policy's fp32
masters and its loss scale are saved in Lightning's own checkpoint, and schedules hold on skips.

Run: python examples/lightning_module.py [POLICY]
"""

import ast
import sys
import sysconfig
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.integrations.lightning import HalfstepPrecision, StepLog
from halfstep.optim import AdamW

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")
LENGTH = 192  # number of bytes read of each docstring
# Lightning 2.6 with torch 2.13; and advice about loaders that a set in memory does not need.
warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
warnings.filterwarnings("ignore", message=".*does not have many workers")


def docstrings() -> tuple[TensorDataset, TensorDataset]:
    """Return docstrings' bytes and package numbers; every fourth is for validation."""
    rows, labels = [], []
    documented = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module
    for label, package in enumerate(PACKAGES):
        for path in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            if "test" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                text = ast.get_docstring(node) if isinstance(node, documented) else None
                if text and len(text) > 40:
                    rows.append(list(text.encode()[:LENGTH].ljust(LENGTH)))
                    labels.append(label)
    bytes_BT, labels_B = torch.tensor(rows), torch.tensor(labels)
    held = torch.arange(len(labels)) % 4 == 0
    return (
        TensorDataset(bytes_BT[~held], labels_B[~held]),
        TensorDataset(bytes_BT[held], labels_B[held]),
    )


class Classifier(pl.LightningModule):
    """A convolution over windows of five bytes, max-pooled over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.window = nn.Linear(5 * 32, 96)
        self.head = nn.Linear(96, len(PACKAGES))

    def forward(self, bytes_BT):
        """Compute a logit for each package."""
        windows = self.embedding(bytes_BT).unfold(1, 5, 2).flatten(2)
        return self.head(self.window(windows).relu().amax(dim=1))

    def training_step(self, batch, index):
        """Compute the mean loss of a batch in fp32."""
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        """Log the accuracy on a validation batch."""
        hits = self(batch[0]).argmax(dim=1) == batch[1]
        self.log("accuracy", hits.float().mean(), on_epoch=True)

    def configure_optimizers(self):
        """Return AdamW with a cosine schedule that advances every step."""
        optimizer = AdamW(self.parameters(), lr=4e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(policy: str = "bf16-master", epochs: int = 5) -> tuple[float, HalfstepPrecision]:
    pl.seed_everything(0, verbose=False)
    train, held = docstrings()
    precision = HalfstepPrecision(policy)
    trainer = pl.Trainer(
        plugins=[precision],  # 1: instead of precision="bf16-mixed"
        callbacks=[StepLog()],  # 2: loss scale, skipped steps and why
        accelerator="cpu",
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(train, 32, shuffle=True), DataLoader(held, 64))
    accuracy = float(trainer.callback_metrics["accuracy"])
    step = precision.last_step
    print(
        f"{policy}: {len(train)} docstrings, {trainer.global_step} steps, {step.skipped_total} "
        f"skipped, loss scale {step.next_loss_scale:g}, accuracy {accuracy:.3f} on {len(held)}"
    )
    return accuracy, precision


if __name__ == "__main__":
    main(*sys.argv[1:2])
