"""A loop of one's own, with dropout, running means and a planted fault, for captures."""

import torch
from torch import nn

from halfstep import Precision, Recorder

ROWS = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 1)
        )

    def forward(self, x):
        return self.body(x)


def make():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_of


def make_another():
    model = nn.Linear(6, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), loss_of


def loss_of(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean() / batch["parts"]


def batches(steps, parts=1, bad=None, times=300.0):
    """A regression's batches; those of the ``bad`` steps have targets times ``times``."""
    draw = torch.Generator().manual_seed(5)
    for step in range(1, steps + 1):
        micro = []
        for _ in range(parts):
            x = torch.randn(ROWS, 6, generator=draw)
            y = x.sum(1, keepdim=True)
            y = y * times if step in (bad or ()) else y
            micro.append({"x": x, "y": y, "parts": parts})
        yield micro


def train(policy, folder, data, *, captures=2, on_spike="off", on_nonfinite="stop", spoil=None):
    """Train with a Recorder; ``spoil(step, model)`` may break something before a step."""
    model, optimizer, _ = make()
    torch.manual_seed(7)
    precision = Precision(policy, model, optimizer, on_spike=on_spike, on_nonfinite=on_nonfinite)
    results = []
    with Recorder(precision, folder, captures=captures) as recorder:
        for step, micro in enumerate(data, 1):
            if spoil is not None:
                spoil(step, model)
            for part in micro:
                recorder.batch(part, rows=[step])
                with precision.autocast():
                    loss = loss_of(model, part)
                precision.backward(loss)
            results.append(recorder.step(precision.step(max_norm=1.0)))
    return precision, results
