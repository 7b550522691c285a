"""Wrappers of torch's own whose formats are not the policy's are refused, with the way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from distributed import loops
from halfstep.errors import PrecisionError
from halfstep.optim.optimizers import AdamW
from halfstep.precision.step import Precision

pytestmark = pytest.mark.distributed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def made(kind, policy, *, stored=FP32, own=False, parts=None, **casts):
    """The refusal's text, or "" where Precision takes the model and a step trains it."""
    model = loops.net().to(stored)
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif parts is not None:
        mesh = init_device_mesh("cpu", (2,))
        for part in parts:
            fully_shard(
                getattr(model, part) if part else model,
                mesh=mesh,
                mp_policy=MixedPrecisionPolicy(**casts),
            )
    else:
        model = loops.wrap(kind, model, **casts)
    optimizer = (AdamW if own else torch.optim.AdamW)(model.parameters(), lr=0.01)
    before = [type(p) for group in optimizer.param_groups for p in group["params"]]
    try:
        precision = Precision(policy, model, optimizer)
    except PrecisionError as error:
        after = [type(p) for group in optimizer.param_groups for p in group["params"]]
        assert before == after
        return str(error)
    for step in range(2):
        with precision.autocast():
            loss = loops.mse(model, loops.data(step))
        assert precision.step(loss).applied
    return ""


def run(rank, **arguments):
    return made(**arguments)


def both(pool, **arguments):
    texts = pool.run(run, **arguments)
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_weights_gathered_in_bf16_are_refused_where_the_policy_says_otherwise(pool2, policy):
    text = both(pool2, kind="fsdp", policy=policy, param_dtype=BF16, reduce_dtype=FP32)
    for words in ("param_dtype=bf16", f"policy {policy}", "param_dtype=None", "bf16-module"):
        assert words in text


def test_and_taken_under_the_policy_that_says_so(pool2):
    assert both(pool2, kind="fsdp", policy="bf16-module", param_dtype=BF16, reduce_dtype=FP32) == ""


def test_fp16_is_no_bf16(pool2):
    text = both(pool2, kind="fsdp", policy="bf16-module", param_dtype=FP16, reduce_dtype=FP32)
    assert "param_dtype=fp16" in text
    assert "param_dtype=torch.bfloat16" in text


def test_sums_in_bf16_are_refused_where_the_policy_adds_in_fp32(pool2):
    """FSDP2 adds in ``param_dtype`` where no ``reduce_dtype`` is given: a trap of its own."""
    text = both(pool2, kind="fsdp", policy="bf16-module", param_dtype=BF16)
    assert "sums gradients in bf16" in text
    assert "reduce_dtype=torch.float32" in text
    assert both(pool2, kind="fsdp", policy="bf16-module,reduce=bf16", param_dtype=BF16) == ""
    text = both(pool2, kind="fsdp", policy="bf16-mixed", reduce_dtype=BF16)
    assert "reduce=bf16" in text
    assert both(pool2, kind="fsdp", policy="bf16-mixed,reduce=bf16", reduce_dtype=BF16) == ""


def test_outputs_in_16_bits_are_refused(pool2):
    text = both(pool2, kind="fsdp", policy="fp32", output_dtype=BF16)
    assert "output_dtype=bf16" in text


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed"])
def test_no_casts_and_fp32_casts_are_taken(pool2, policy):
    assert both(pool2, kind="fsdp", policy=policy) == ""
    assert both(pool2, kind="fsdp", policy=policy, param_dtype=FP32, reduce_dtype=FP32) == ""


@pytest.mark.parametrize("kind", ["one", "ddp", "tp"])
def test_casts_by_module_need_fsdp2(pool2, kind):
    text = both(pool2, kind=kind, policy="bf16-module")
    for words in ("bf16-module", "fully_shard", "parallel=shard=N", "bf16-mixed"):
        assert words in text


def test_casts_by_module_need_all_of_the_model_sharded(pool2):
    casts = {"param_dtype": BF16, "reduce_dtype": FP32}
    text = both(pool2, kind="", policy="bf16-module", parts=("up", "down"), **casts)
    assert "norm.weight is not sharded" in text
    assert both(pool2, kind="", policy="bf16-module", parts=("up", ""), **casts) == ""


def test_casts_by_module_are_refused_on_one_device():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PrecisionError, match=r"is not sharded.*bf16-mixed"):
        Precision("bf16-module", model, optimizer)


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master"])
def test_masters_that_take_gradients_before_ddp_sums_them_are_refused(pool2, policy):
    text = both(pool2, kind="ddp", policy=policy)
    for words in ("DistributedDataParallel", policy, "parallel=data=N"):
        assert words in text


@pytest.mark.parametrize("policy", ["bf16-split", "bf16-sr", "bf16-kahan"])
def test_so_are_weights_with_a_remainder(pool2, policy):
    assert "DistributedDataParallel" in both(pool2, kind="ddp", policy=policy, own=True)


def alone_under_ddp(rank):
    """What the refusal is for: the hook that moves gradients on, in the order torch calls it."""
    model = loops.wrap("ddp", nn.Linear(2, 1, bias=False))
    taken = []
    weight = model.module.weight

    def move_on(parameter):
        taken.append(parameter.grad.clone())
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(move_on)
    model(torch.full((1, 2), float(rank + 1))).sum().backward()
    return taken[0].tolist()


def test_ddp_sums_after_the_hook_that_moves_gradients_on(pool2):
    """If torch ever sums before it, the refusal can go."""
    assert pool2.run(alone_under_ddp) == [[[1.0, 1.0]], [[2.0, 2.0]]]


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed"])
def test_bf16_weights_that_are_sharded_are_never_silent_bf16_masters(pool2, policy):
    text = both(pool2, kind="fsdp", policy=policy, stored=BF16)
    assert "keeps trainable weights in fp32" in text
    assert "norm.weight" in text


def upcast(rank):
    model = loops.wrap("fsdp", loops.net().bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        Precision("bf16-mixed", model, optimizer, upcast_trainable=True)
    except PrecisionError as error:
        assert {p.dtype for p in model.parameters()} == {BF16}
        return str(error)
    return ""


def test_sharded_weights_cannot_be_upcast(pool2):
    texts = pool2.run(upcast)
    assert texts[0] == texts[1]
    assert "before it is sharded" in texts[0]


@pytest.mark.parametrize("policy", ["bf16-pure", "bf16-master", "bf16-split"])
def test_16_bit_policies_take_weights_that_were_cast_before_and_no_others(pool2, policy):
    own = policy == "bf16-split"
    reduce = BF16 if policy == "bf16-pure" else FP32
    assert both(pool2, kind="fsdp", policy=policy, stored=BF16, own=own, reduce_dtype=reduce) == ""
    text = both(pool2, kind="fsdp", policy=policy, own=own, reduce_dtype=reduce)
    assert "cast the model before it is sharded" in text


def test_fsdp1_is_refused(pool2):
    text = both(pool2, kind="fsdp1", policy="fp32")
    assert "FSDP1" in text
    assert "fully_shard" in text
