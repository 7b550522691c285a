"""A plain PyTorch loop in mixed precision: four changed lines, marked.

Run: python examples/minimal_loop.py [POLICY]
"""

import sys

import torch
from torch import nn

import halfstep  # 1


def main(policy: str = "bf16-mixed") -> list[halfstep.StepResult]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = halfstep.Precision(policy, model, optimizer)  # 2
    inputs = torch.randn(512, 32)
    targets = inputs[:, :4].sum(dim=1, keepdim=True).tanh()
    results = []
    for step in range(100):
        rows = torch.randint(len(inputs), (64,))
        with precision.autocast():  # 3
            loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        result = precision.step(loss, max_norm=1.0)  # 4: backward, clip, optimizer.step, zero_grad
        results.append(result)
        if step % 20 == 0 or not result.applied:
            print(
                f"step {step:3}  loss {result.loss:.4f}  |g| {result.grad_norm:.3f}  "
                f"scale {result.loss_scale:g}  "
                f"{'applied' if result.applied else 'skipped: ' + str(result.reason)}"
            )
    return results


if __name__ == "__main__":
    main(*sys.argv[1:2])
