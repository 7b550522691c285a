"""halfstep.Trainer with your own module, data and loss: digits, classified by a small CNN.

Run: python examples/own_module.py [POLICY]     (needs scikit-learn for its handwritten digits)
     torchrun --nproc-per-node 2 examples/own_module.py
"""

import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

import halfstep


def main(policy: str = "bf16-mixed", folder: str | None = None) -> halfstep.TrainResult:
    images, classes = load_digits(return_X_y=True)
    digits = TensorDataset(
        torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(classes)
    )
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Linear(576, 10),
    )  # fmt: skip

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        logits = model(batch[0])
        accuracy = (logits.argmax(1) == batch[1]).float().mean()
        return {"loss": cross_entropy(logits, batch[1]), "accuracy": accuracy}

    trainer = halfstep.Trainer(
        model,
        Subset(digits, range(1400)),
        loss,
        val_data=Subset(digits, range(1400, 1797)),
        evaluate=evaluate,
        best_by="accuracy",
        precision=policy,
        epochs=4,
        learning_rate=3e-3,
        output_dir=folder or tempfile.mkdtemp(),
    )
    return trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:2])
