"""Wrappers of torch's own whose formats are not the policy's are refused, with the way out."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from distributed import loops
from every import every
from halfstep.errors import PrecisionError
from halfstep.optim.optimizers import AdamW
from halfstep.precision.step import Precision

pytestmark = pytest.mark.distributed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def made(kind, policy, *, stored=FP32, own=False, parts=None, **casts):
    """The refusal's text, or "" where Precision takes the model and its steps train it."""
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


def run(rank, cases):
    return [made(kind, policy, **options) for kind, policy, options, _ in cases]


GATHERED = {"param_dtype": BF16, "reduce_dtype": FP32}
MASTERS = "keeps trainable weights in fp32|norm.weight"
CASES = [
    *(
        ("fsdp", policy, GATHERED, f"param_dtype=bf16|policy {policy}|param_dtype=None|bf16-module")
        for policy in ("fp32", "bf16-mixed", "fp16-mixed")
    ),
    ("fsdp", "bf16-module", GATHERED, ""),
    (
        "fsdp",
        "bf16-module",
        {"param_dtype": FP16, "reduce_dtype": FP32},
        "param_dtype=fp16|param_dtype=torch.bfloat16",
    ),
    ("fsdp", "bf16-module,reduce=bf16", {"param_dtype": BF16}, ""),
    ("fsdp", "bf16-mixed", {"reduce_dtype": BF16}, "reduce=bf16"),
    ("fsdp", "bf16-mixed,reduce=bf16", {"reduce_dtype": BF16}, ""),
    ("fsdp", "fp32", {"output_dtype": BF16}, "output_dtype=bf16"),
    *(
        ("fsdp", policy, casts, "")
        for policy in ("fp32", "bf16-mixed")
        for casts in ({}, {"param_dtype": FP32, "reduce_dtype": FP32})
    ),
    *(
        (kind, "bf16-module", {}, "bf16-module|fully_shard|parallel=shard=N|bf16-mixed")
        for kind in ("one", "ddp", "tp")
    ),
    ("", "bf16-module", {**GATHERED, "parts": ("up", "down")}, "norm.weight is not sharded"),
    ("", "bf16-module", {**GATHERED, "parts": ("up", "")}, ""),
    ("fsdp", "fp32", {"stored": BF16}, MASTERS),
    ("fsdp", "bf16-mixed", {"stored": BF16}, MASTERS),
    ("fsdp", "bf16-master", {"reduce_dtype": BF16}, "reduce_dtype=bf16|reduce=bf16"),
    ("fsdp", "bf16-master,keep_fp32=type:LayerNorm", {}, "norm.weight|fully_shard on their"),
    ("fsdp1", "fp32", {}, "FSDP1|fully_shard"),
]
"""Wrapper, policy, the wrapper's options, and what the refusal says: nothing where it trains."""


def test_formats_of_a_wrapper_must_be_the_policys(pool2):
    first, second = pool2.run(run, cases=CASES)
    assert first == second

    def check(case, text):
        words = case[3].split("|") if case[3] else []
        assert bool(text) == bool(words), text
        assert all(word in text for word in words), text

    every(zip(CASES, first, strict=True), check)
