"""One small training run, on one device or as one of several ranks: what parity tests compare."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from tests.reference.adam import EPS
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import choose_strategy, plan_of
from halfstep.precision.masters.local_part import local_part
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision
from halfstep.trainer.config.run import OptimizerConfig
from halfstep.trainer.models.gpt import GPT, GPTConfig
from halfstep.trainer.session import compiled_
from halfstep.trainer.step import make_optimizer

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 51}
SEQUENCES = 8


def sequences(step):
    """The tokens and targets of one step; every third target does not count."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, SHAPE["vocab_size"], (SEQUENCES, 17), generator=generator)
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    targets[::3, 5:] = -100
    return inputs, targets


def prepare(
    layout, policy, *, shape=(), kind="adamw", **options,
):  # fmt: skip
    """Strategy, model and Precision of one rank."""
    value = parse_policy(policy)
    strategy = choose_strategy(layout, value, "cpu")
    model = GPT(GPTConfig(**{**SHAPE, **dict(shape)}), seed=1)
    strategy.place_(model, plan_of(model))
    config = OptimizerConfig(name=kind, learning_rate=1e-2, eps=EPS)
    optimizer = make_optimizer(model, config, value, seed=5)
    precision = Precision(value, model, optimizer, ranks=strategy.ranks, **options)
    strategy.attach_(precision)
    return strategy, model, precision


def backward_all(strategy, model, precision, step, micro=1, factor=1.0):
    """All micro-batches of one step on this rank, to the finished sums of gradients."""
    inputs, targets = sequences(step)
    ranks, mine = strategy.layout.batch_ranks, strategy.batch_rank
    share = range(mine * SEQUENCES // ranks, (mine + 1) * SEQUENCES // ranks)
    size = len(share) // micro
    (count,) = strategy.sum([int((targets[share.start : share.stop] != -100).sum())])
    for i in range(micro):
        here = slice(share.start + i * size, share.start + (i + 1) * size)
        with strategy.micro_batch(last=i == micro - 1), precision.autocast():
            total, _ = model.loss_sum((inputs[here], targets[here]))
            precision.backward(total / count * factor)
    strategy.finish()


def compile_blocks(model, layout):
    """As the trainer does, without making code."""
    torch._dynamo.reset()
    counters.clear()
    fast = partial(torch.compile, backend="eager", fullgraph=True)
    task = SimpleNamespace(by_block=False, loss_sum=model.loss_sum)
    with mock.patch.object(torch, "compile", fast):
        compiled_(task, plan_of(model), layout)


def run(
    rank, layout, policy, *, steps=3, micro=1, poison=(), bad_loss=(), compiled=False, **options
):
    """Train; returns losses, norms, whether applied, scales and the whole final weights.

    ``micro`` micro-batches on each rank; ``poison`` gives (step, rank) whose gradients get an inf
    in one element of this rank's part of one parameter; ``bad_loss`` those whose loss is NaN.
    """
    layout = Layout.parse(layout)
    strategy, model, precision = prepare(str(layout), policy, **options)
    if compiled:
        compile_blocks(model, layout)
    results, unchanged, graphs = [], [], []
    for step in range(steps):
        factor = float("nan") if (step, rank) in bad_loss else 1.0
        backward_all(strategy, model, precision, step, micro, factor)
        if (step, rank) in poison:
            gradients = precision.masters.gradients()
            gradient = next(g for p, g in gradients.items() if g.dim() == 2 and g.numel())
            gradient[0, 0] = float("inf")
        before = fingerprint(model, precision)
        results.append(precision.step())
        unchanged.append(fingerprint(model, precision) == before)
        graphs.append(counters["stats"]["unique_graphs"])
    return told(results) | {
        "unchanged": unchanged,
        "graphs": graphs,
        "weights": {n: whole(p, m) for n, p, m in masters(model, precision)},
    }


def told(results):
    """What the steps of a run say, by what it is."""
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "applied": [r.applied for r in results],
        "scales": [r.next_loss_scale for r in results],
        "names": [r.nonfinite_parameters for r in results],
        "reasons": [r.reason for r in results],
    }


def same_bits(one, other):
    """Tensors by name are equal in every bit, and of one dtype."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def fingerprint(model, precision):
    """Every bit of this rank's weights, masters, moments and step counters."""
    found = {f"weight {n}": _bits(local_part(p)) for n, p in model.named_parameters()}
    found |= {f"master {n}": _bits(p) for n, p in precision.masters.items()}
    for i, optimizer in enumerate(precision.optimizers):
        for j, state in enumerate(optimizer.state.values()):
            for key, kept in state.items():
                found[f"state {i} {j} {key}"] = (
                    _bits(local_part(kept)) if torch.is_tensor(kept) else kept
                )
    return found


def _bits(tensor):
    return (str(tensor.dtype), tuple(tensor.shape), tensor.detach().contiguous().view(-1)
            .view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")  # fmt: skip


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


def first_gradients(rank, layout, policy, *, micro=1, **options):
    """The first step's whole gradients, as the optimizer is about to get them."""
    strategy, model, precision = prepare(layout, policy, **options)
    backward_all(strategy, model, precision, 0, micro)
    named = dict(model.named_parameters())
    held = precision.named_parameters()
    found = precision.masters.gradients()
    return {n: whole(named[n], found[p]) for n, p in held.items() if p in found}
