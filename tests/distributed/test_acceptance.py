"""What torch does by itself where several ranks train, and users complain of.

That halfstep does otherwise is shown in test_precision_ranks.py, test_local.py and
test_wrappers.py. If torch mends it, the test says so.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distributed import loops

pytestmark = [pytest.mark.distributed, pytest.mark.covering(ends=True)]


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


def overflow(rank):
    """A step with an inf in rank 1's part of the second parameter only."""
    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = [p.to_local().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model()).backward()
    if rank == 1:
        model.second.grad.to_local()[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    pairs = zip(before, model.parameters(), strict=True)
    return any(not torch.equal(a, p.to_local()) for a, p in pairs), scaler.get_scale()


def test_a_torch_asks_the_first_gradient_only_how_it_lies(pool2):
    # the scales have parted for good, without a word
    assert pool2.run(overflow) == [(True, 8.0), (False, 4.0)]


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


def loaded_in_bf16(rank):
    """FSDP2 of a model that was loaded in bf16, as loaders do by themselves."""
    model = loops.net().bfloat16()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loops.mse(model, [t.bfloat16() for t in loops.data(0)]).backward()
        optimizer.step()
    moments = {s["exp_avg"].dtype for s in optimizer.state.values()}
    return {p.dtype for p in model.parameters()} | moments, [str(w.message) for w in said]


def test_j_torch_trains_bf16_masters_without_a_word(pool2):
    for dtypes, said in pool2.run(loaded_in_bf16):
        assert dtypes == {torch.bfloat16}
        assert [text for text in said if "bfloat16" in text or "precision" in text] == []
