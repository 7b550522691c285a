"""What full sharding sends, by formula and as the collectives are called; and where weights lie."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from distributed import parity
from halfstep.distributed.traffic import all_gather, all_reduce, reduce_scatter
from halfstep.precision.masters.local_part import reshard_

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]

# torch 2.13 calls the second of each; before, the first.
GATHERS = [n for n in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, n)]
SCATTERS = [n for n in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, n)]
EVEN = {"vocab_size": 52}  # every first dim is a multiple of 4 then: nothing is filled up


def tensors(args, options):
    """Output and input of a collective, by place or by name."""
    given = [*args, *(v for v in options.values() if isinstance(v, torch.Tensor))]
    return given[0], given[1]


def observed(rank, layout, policy, micro, shape=(), frozen=()):
    """Bytes of a step: by the strategy's formula, all fp32, and as torch calls the collectives."""
    strategy, model, precision = parity.prepare(layout, policy, shape=dict(shape), frozen=frozen)
    formula = strategy.traffic(micro)
    sent = {"gathered": 0, "summed": 0, "over copies": 0, "dtypes": set()}
    own = {name: getattr(dist, name) for name in (*GATHERS, *SCATTERS, "all_reduce")}

    def gather(name, *args, **options):
        output, source = tensors(args, options)
        sent["gathered"] += all_gather(output.nbytes, output.numel() // source.numel())
        sent["dtypes"].add(("gathered", str(output.dtype)))
        return own[name](*args, **options)

    def scatter(name, *args, **options):
        output, source = tensors(args, options)
        sent["summed"] += reduce_scatter(source.nbytes, source.numel() // output.numel())
        sent["dtypes"].add(("summed", str(source.dtype)))
        return own[name](*args, **options)

    def reduce(name, tensor, *args, **options):
        if options.get("group") is not None:  # the default group's is the agreement of ranks
            ranks = dist.get_world_size(options["group"])
            sent["over copies"] += all_reduce(tensor.nbytes, ranks)
        return own[name](tensor, *args, **options)

    counted = {name: gather for name in GATHERS} | {name: scatter for name in SCATTERS}
    counted["all_reduce"] = reduce
    for step in range(2):  # the first one also lays memory out
        for name, function in counted.items() if step else ():
            setattr(dist, name, functools.partial(function, name))
        try:
            parity.backward_all(strategy, model, precision, step, micro)
            precision.step()
        finally:
            for name, function in own.items():
                setattr(dist, name, function)
    return formula, sent


def check(found, slack):
    for (sent, fp32), seen in found:
        for formula, counted in (
            (sent.parameters, seen["gathered"]),
            (sent.gradients, seen["summed"] + seen["over copies"]),
        ):
            assert formula <= counted <= formula + slack
        assert sent.activations == fp32.activations == 0
        assert sent.total <= fp32.total


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(
    ("policy", "gathered", "summed"),
    [("fp32", 4, 4), ("bf16-mixed", 4, 4), ("bf16-module", 2, 4), ("bf16-master", 2, 4),
     ("bf16-pure", 2, 2), ("bf16-mixed,reduce=bf16", 4, 2)],
)  # fmt: skip
def test_the_bytes_are_those_that_are_sent(pool2, policy, gathered, summed, micro):
    found = pool2.run(observed, layout="shard=2", policy=policy, micro=micro, shape=EVEN)
    check(found, slack=0)
    (sent, fp32), seen = found[0]
    assert fp32.parameters * gathered == sent.parameters * 4
    assert fp32.gradients * summed == sent.gradients * 4
    names = {2: "torch.bfloat16", 4: "torch.float32"}
    assert seen["dtypes"] == {("gathered", names[gathered]), ("summed", names[summed])}


def placed(rank, policy):
    _, model, precision = parity.prepare("shard=2", policy, shape=EVEN)
    whole = sum(math.prod(p.shape) for p in model.parameters())
    held = sum(p.numel() for p in precision.named_parameters().values())
    with precision.masters.installed():
        owned = sum(p.numel() for g in precision.optimizers[0].param_groups for p in g["params"])
    before = [isinstance(m, FSDPModule) for m in (model, *model.blocks())]
    with torch.no_grad():
        model.loss_sum(parity.sequences(0))
    gathered = type(model.wte.weight.data).__name__
    reshard_(model)
    return whole, held, owned, before, gathered, type(model.wte.weight.data).__name__


@pytest.mark.parametrize("policy", ["fp32", "bf16-master", "bf16-split"])
def test_each_rank_trains_half_of_the_numbers_and_gathered_weights_are_dropped(pool2, policy):
    for whole, held, owned, sharded, gathered, settled in pool2.run(placed, policy=policy):
        assert held == owned == whole // 2
        assert all(sharded)
        assert (gathered, settled) == ("Tensor", "DTensor")
