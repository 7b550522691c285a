"""Each weight is updated during backward, and its gradient is freed at once, by torch's own hook.

A weight takes 2 bytes, its remainder 1 and its moments 2. But the norm of all gradients is unknown
before the first update: no clipping, accumulation, loss scale, or step that is skipped as a whole.

Run: python examples/step_in_backward.py
"""

import torch
from torch import Tensor, nn

from halfstep.optim import AdamW


def main() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).bfloat16()
    optimizers = {
        p: AdamW([p], lr=1e-2, update="split24", moments="8bit") for p in model.parameters()
    }

    def update(weight: Tensor) -> None:
        assert sum(p.grad is not None for p in optimizers) == 1, "one gradient at a time"
        optimizers[weight].step()
        weight.grad = None

    for weight in optimizers:
        weight.register_post_accumulate_grad_hook(update)
    inputs = torch.randn(512, 32)
    targets, losses = inputs[:, :4].sum(dim=1, keepdim=True).tanh(), []
    for rows in torch.randint(len(inputs), (100, 64)):
        loss = nn.functional.mse_loss(model(inputs[rows].bfloat16()).float(), targets[rows])
        losses.append(loss.item())
        loss.backward()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
