"""What users complain of where several ranks train: tests A, I and J of the list of complaints.

Beside each stands what torch does by itself. If torch mends it, the test says so.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from tests.reference.adam import assert_near
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distributed import loops, parity
from halfstep.errors import PrecisionError
from halfstep.precision.step import Precision

pytestmark = [pytest.mark.distributed, pytest.mark.covering]


class Product(nn.Module):
    """A replicated DTensor first, a sharded one second."""

    def __init__(self):
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(1.0, 9.0).reshape(4, 2)
        for name, how in (("first", [Replicate()]), ("second", [Shard(0)])):
            placed = distribute_tensor(whole.clone(), mesh, how, src_data_rank=None)
            setattr(self, name, nn.Parameter(placed))

    def forward(self):
        first = self.first.to_local(grad_placements=[Replicate()])
        second = self.second.to_local(grad_placements=[Shard(0)])
        return first.sum() + second.sum()


def overflow(rank, who, at):
    """Two steps, in the first an inf in rank ``at``'s part of the second parameter only."""
    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = [p.to_local().clone() for p in model.parameters()]
    if who == "torch":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model()).backward()
    else:
        precision = Precision("fp16-mixed,init_scale=8", model, optimizer)
        with precision.autocast():
            loss = model()
        precision.backward(loss)
    if rank == at:
        model.second.grad.to_local()[0, 0] = math.inf
    if who == "torch":
        scaler.step(optimizer)
        scaler.update()
        scale = scaler.get_scale()
        names = ()
    else:
        result = precision.step()
        scale, names = result.next_loss_scale, result.nonfinite_parameters
    moved = any(
        not torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True)
    )
    return moved, scale, names


def test_a_torch_asks_the_first_gradient_only_how_it_lies(pool2):
    found = pool2.run(overflow, who="torch", at=1)
    assert [scale for _, scale, _ in found] == [8.0, 4.0]  # parted for good, without a word
    assert [moved for moved, _, _ in found] == [True, False]


@pytest.mark.parametrize("at", [0, 1])
def test_a_both_ranks_skip_with_one_scale_and_one_name(pool2, at):
    assert pool2.run(overflow, who="ours", at=at) == [(False, 4.0, ("second",))] * 2


def by_hand(rank, who):
    """Shards that no DTensor tells of: each rank has half of a matrix as a plain parameter."""
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(rank + 1.0)
    model.weight.tensor_model_parallel = True  # else Precision refuses it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.full((1, 2), math.inf if rank == 0 else 1.0)
    if who == "torch":
        loss = model(torch.ones(1, 2)).sum()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss).backward()
        model.weight.grad.mul_(x)
        scaler.step(optimizer)
        scaler.update()
        found = scaler.get_scale()
    else:
        precision = Precision("fp16-mixed,init_scale=8", model, optimizer)
        with precision.autocast():
            loss = model(torch.ones(1, 2)).sum()
        precision.backward(loss)
        model.weight.grad.mul_(x)
        found = precision.step().next_loss_scale
    return found, model.weight[0, 0].item()


def test_a_plain_shards_of_ones_own_too(pool2):
    assert [scale for scale, _ in pool2.run(by_hand, who="torch")] == [4.0, 8.0]
    assert pool2.run(by_hand, who="ours") == [(4.0, 1.0), (4.0, 2.0)]


MIXED_UP = "mixed torch.Tensor and DTensor"


def torch_with_parts_and_plain(rank, what):
    """A plan that leaves the norm out, and torch's own tools; the error's text, or ""."""
    model = loops.wrap("tp", loops.net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=what == "foreach")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = loops.mse(model, loops.data(0))
    (scaler.scale(loss) if what == "scaler" else loss).backward()
    assert len({isinstance(p, DTensor) for p in model.parameters()}) == 2
    try:
        if what == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif what == "scaler":
            scaler.unscale_(optimizer)
        else:
            optimizer.step()
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["clip", "foreach", "scaler"])
def test_i_torch_raises_on_dtensors_beside_plain_tensors(pool2, what):
    for text in pool2.run(torch_with_parts_and_plain, what=what):
        assert MIXED_UP in text


@pytest.mark.parametrize("optimizer", ["foreach", "fused", "loop"])
@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed,init_scale=256", "bf16-mixed"])
def test_i_one_optimizer_holds_parts_and_plain_tensors_with_scaler_and_clipping(
    pool2, optimizer, policy
):
    one = loops.train(0, "one", "fp32", max_norm=0.5)
    many = pool2.run(loops.train, kind="tp", policy=policy, optimizer=optimizer, max_norm=0.5)
    assert many[0]["applied"] == [True] * 4
    for key in ("losses", "norms", "scales"):
        assert many[0][key] == many[1][key]
    for name, weight in one["weights"].items():
        assert torch.equal(many[0]["weights"][name], many[1]["weights"][name])
        # at most twice the learning rate a step; see test_parity
        assert float((many[0]["weights"][name] - weight).abs().max()) < 2 * 4 * 0.01 * 1.01, name
    if policy == "fp32":
        rates = [loops.RATE] * 4
        assert_near(many[0]["weights"], one["weights"], rates, max_norm=0.5, betas=(0.9, 0.999))
    # 2^-8 and 2^-11 are the unit roundoffs of bf16 and fp16
    u = {"fp32": 2.0**-20, "bf16-mixed": 2.0**-6}.get(policy, 2.0**-9)
    assert many[0]["losses"] == pytest.approx(one["losses"], rel=u)


def loaded_in_bf16(rank, who):
    """FSDP2 of a model that was loaded in bf16, as loaders do by themselves."""
    model = loops.net().bfloat16()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if who == "torch":
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loops.mse(model, [t.bfloat16() for t in loops.data(0)]).backward()
            optimizer.step()
        moments = {s["exp_avg"].dtype for s in optimizer.state.values()}
        return {p.dtype for p in model.parameters()} | moments, [str(w.message) for w in said]
    try:
        Precision("bf16-mixed", model, optimizer)
    except PrecisionError as error:
        return str(error)
    return ""


def test_j_torch_trains_bf16_masters_without_a_word(pool2):
    for dtypes, said in pool2.run(loaded_in_bf16, who="torch"):
        assert dtypes == {torch.bfloat16}
        assert [text for text in said if "bfloat16" in text or "precision" in text] == []


def test_j_a_model_loaded_in_bf16_is_refused_by_name(pool2):
    texts = pool2.run(loaded_in_bf16, who="ours")
    assert texts[0] == texts[1]
    for words in ("keeps trainable weights in fp32", "norm.weight", "model.float()", "bf16"):
        assert words in texts[0]


def trained_by_a_strategy(rank):
    strategy, model, precision = parity.prepare("shard=2", "bf16-master")
    masters = {master.dtype for _, master in precision.masters.items()}
    return type(strategy).__name__, {p.dtype for p in model.parameters()}, masters


def test_j_a_strategy_shards_bf16_weights_with_fp32_masters(pool2):
    wanted = ("FullySharded", {torch.bfloat16}, {torch.float32})
    assert pool2.run(trained_by_a_strategy) == [wanted] * 2
