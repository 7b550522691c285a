"""One small training run, on one device or as one of several ranks: what parity tests compare."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from halfstep.distributed.layout import Layout
from halfstep.distributed.plan import plan_of
from halfstep.distributed.select import choose_strategy
from halfstep.models.gpt import GPT, GPTConfig
from halfstep.precision.parse import parse_policy
from halfstep.precision.step import Precision
from halfstep.training.optimizer import OptimizerConfig, make_optimizer

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 51}
SEQUENCES = 8


def sequences(step):
    """The tokens and targets of one step; every third target does not count."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, SHAPE["vocab_size"], (SEQUENCES, 17), generator=generator)
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    targets[::3, 5:] = -100
    return inputs, targets


def run(rank, layout, policy, *, steps=4, micro=1, max_norm=None, poison=(), head=None, shape=()):
    """Train; returns losses, norms, whether applied, scales and the whole final weights.

    ``micro`` micro-batches on each rank; ``poison`` gives (step, rank) whose gradients get an inf
    in one element of this rank's part of one parameter.
    """
    layout = Layout.parse(layout)
    value = parse_policy(policy)
    device = torch.device("cpu")
    strategy = choose_strategy(layout, value, device)
    model = GPT(GPTConfig(**{**SHAPE, **dict(shape)}), seed=1)
    strategy.place_(model, plan_of(model))
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2), value, seed=5)
    precision = Precision(value, model, optimizer, ranks=strategy.ranks)
    strategy.attach_(precision)
    results = []
    for step in range(steps):
        inputs, targets = sequences(step)
        ranks = layout.batch_ranks
        share = range(strategy.batch_rank * SEQUENCES // ranks,
                      (strategy.batch_rank + 1) * SEQUENCES // ranks)  # fmt: skip
        size = len(share) // micro
        (count,) = strategy.sum([int((targets[share.start : share.stop] != -100).sum())])
        for i in range(micro):
            here = slice(share.start + i * size, share.start + (i + 1) * size)
            with strategy.micro_batch(last=i == micro - 1), precision.autocast():
                total, _ = model.loss_sum((inputs[here], targets[here]))
                precision.backward(total / count)
        strategy.finish()
        if (step, rank) in poison:
            gradients = precision.masters.gradients([*precision.named_parameters().values()])
            gradient = next(g for p, g in gradients.items() if g.dim() == 2 and g.numel())
            gradient[0, 0] = float("inf")
        results.append(precision.step(max_norm=max_norm))
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "applied": [r.applied for r in results],
        "scales": [r.next_loss_scale for r in results],
        "names": [r.nonfinite_parameters for r in results],
        "weights": {n: whole(p, m) for n, p, m in masters(model, precision)},
        "order": list(range(layout.size)),
    }


def masters(model, precision):
    """Name, the model's parameter and what is trained for it."""
    named = dict(model.named_parameters())
    return [(name, named[name], value) for name, value in precision.masters.items()]


def whole(parameter, part):
    """The whole tensor from every rank's part."""
    if not isinstance(parameter, DTensor):
        return part.detach().clone()
    placed = DTensor.from_local(
        part.detach(), parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
    return placed.full_tensor().clone()
