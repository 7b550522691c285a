"""The policies of the design's table, their names, and the combinations that are refused."""

import pytest
import torch

from every import every
from halfstep import POLICIES, LossScaleConfig, PrecisionError, PrecisionPolicy

F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
# The design, section 2, copied by hand: params, compute, output, grad, reduce, master, tf32, scale,
# how an update reaches the weights, the moments, and what else is so (see the test).
TABLE = {
    "fp32": (F32, F32, F32, F32, F32, F32, False, "none", "nearest", "fp32", ""),
    "tf32": (F32, F32, F32, F32, F32, F32, True, "none", "nearest", "fp32", ""),
    "bf16-mixed": (F32, B16, F32, F32, F32, F32, False, "none", "nearest", "fp32", "op"),
    # FSDP2 casts, not autocast
    "bf16-module": (F32, B16, F32, F32, F32, F32, False, "none", "nearest", "fp32", ""),
    "fp16-mixed": (F32, F16, F32, F32, F32, F32, False, "dynamic", "nearest", "fp32", "op"),
    "bf16-master": (B16, B16, F32, F32, F32, F32, False, "none", "nearest", "fp32", "masters"),
    "fp16-master": (F16, F16, F32, F32, F32, F32, False, "dynamic", "nearest", "fp32", "masters"),
    # the weight and its remainder are the exact fp32 master
    "bf16-split": (B16, B16, F32, F32, F32, F32, False, "none", "split", "fp32", ""),
    "bf16-split24": (B16, B16, F32, F32, F32, F32, False, "none", "split24", "fp32", ""),
    # bf16 is what the optimizer updates; nothing but the update is rounded on the way to it
    "bf16-kahan": (B16, B16, F32, F32, F32, B16, False, "none", "kahan", "bf16", ""),
    "bf16-sr": (B16, B16, F32, F32, F32, B16, False, "none", "stochastic", "bf16", ""),
    "bf16-pure": (B16, B16, F32, B16, B16, B16, False, "none", "nearest", "bf16", "pure"),
    "fp16-pure": (F16, F16, F32, F16, F16, F16, False, "dynamic", "nearest", "fp16", "pure"),
}
FIELDS = ("param", "compute", "output", "grad", "reduce", "master")


def test_policy_is_the_table_s_row():
    def check(name):
        policy = POLICIES[name]
        got = (
            *(getattr(policy, f"{f}_dtype") for f in FIELDS),
            policy.tf32,
            policy.loss_scale.kind,
        )
        *wanted, kind = TABLE[name]
        assert [*got, policy.update, policy.moment_format] == wanted
        assert policy.loss_scale == LossScaleConfig(kind=policy.loss_scale.kind)
        assert policy.has_masters == (kind == "masters")
        assert policy.is_pure == (kind == "pure")
        assert policy.casts_per_op == (kind == "op")
        # bf16-split and its kin, and no other preset, need an optimizer that knows their way
        assert policy.needs_own_optimizer == (policy.update != "nearest")
        assert policy.rules == ()

    every(TABLE, check)


def test_a_combination_that_cannot_run_is_refused_with_its_reason():
    def check(fields, message):
        with pytest.raises(PrecisionError, match=message):
            PrecisionPolicy(**fields)

    stored = {"param_dtype": B16, "compute_dtype": B16}
    every(
        [
            ({"compute_dtype": torch.float8_e4m3fn}, "compute=float8_e4m3fn; allowed"),
            ({"param_dtype": B16}, "params=bf16 with compute=fp32.*compute=bf16, or params=fp32"),
            ({**stored, "master_dtype": F16}, "params=bf16 with master=fp16: the master is fp32"),
            ({"master_dtype": B16}, "params=fp32 with master=bf16: the master is fp32 or"),
            ({"grad_dtype": B16}, "grad=bf16 with master=fp32.*use grad=fp32"),
            ({**stored, "master_dtype": B16}, "grad=fp32 with master=bf16.*use grad=bf16"),
            ({"update": "ceil"}, "update=ceil; allowed: nearest, split"),
            ({"moments": "fp64"}, "moments=fp64; allowed: master, fp32, bf16, 8bit"),
            ({"update": "split"}, "update=split with params=fp32.*use params=bf16,master=fp32"),
            ({**stored, "update": "kahan"}, "use params=bf16,master=bf16,update=kahan"),
            ({"casts": "module"}, "casts=module with params=fp32, compute=fp32"),
            ({"tf32": True, "compute_dtype": B16}, "compute=tf32 .*needs params=fp32"),
        ],
        check,
    )
