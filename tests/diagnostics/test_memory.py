"""``halfstep.MemoryMeter`` against tensors counted here."""

import torch
from torch import nn

import halfstep
from halfstep.diagnostics.memory import PARTS


class Chain(nn.Module):
    """Two products and a sum of squares, of which every saved tensor is known."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)

    def forward(self, x):
        return self.b(self.a(x).relu()).float().square().mean()


def test_every_byte_of_a_small_chain(monkeypatch):
    """fp32: x (8) is the batch; relu's result (16) and the output (4) are saved, each once.

    bf16-mixed: x (8) and relu's result (16) are saved in bf16, and so is the second weight's cast
    (4 * 16), which the gradient of relu's result needs; nobody needs one of x. The output's square
    saves its fp32 copy (4), which is of the logits' size.
    """
    monkeypatch.setattr("halfstep.precision.casting.autocast.cpu_has_bf16", lambda: True)
    x = torch.randn(5, 8)
    low = 2 * 5 * (8 + 16)
    for policy, activations, casts, masters, moments in (
        ("fp32", 4 * 5 * 16, 0, 0, 8),
        ("bf16-mixed", low, 2 * 64, 0, 8),
        ("bf16-split", low, 0, 2, 8),
    ):
        model = Chain()
        optimizer = halfstep.optim.AdamW(model.parameters())
        precision = halfstep.Precision(policy, model, optimizer)
        with halfstep.MemoryMeter(precision, x, logits=4) as meter:
            with precision.autocast():
                loss = model(x)
            precision.step(loss)
        memory = meter.memory
        found = {part: memory.part(part) for part in PARTS}
        size = 2 if policy == "bf16-split" else 4
        assert found == {
            "weights": size * 192, "masters": masters * 192, "gradients": size * 192,
            "moments": moments * 192, "cast copies": casts, "activations": activations,
            "logits": 4 * 5 * 4, "batch": 4 * 5 * 8,
        }, policy  # fmt: skip
        assert memory.total == sum(found.values())
        assert str(memory).endswith(policy)
