"""Policies: the design's table, what is refused, names with typing errors, and field strings."""

from dataclasses import fields, replace

import pytest
import torch

from every import every
from halfstep import POLICIES, LossScaleConfig, PrecisionError, PrecisionPolicy, parse_policy
from halfstep.precision.explain import explain_policy
from halfstep.precision.policy.policy import _spell
from halfstep.precision.policy.spelling import parse_saved

F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16


def test_a_typing_error_is_answered_with_what_was_meant():
    for typed, meant in (
        ("bf16-mixd", "bf16-mixed"), ("bf16-masters", "bf16-master"), ("fp16-splt", "fp16-"),
        ("fp23", "fp32"), ("autoo", "auto"), ("nvpf4", "nvfp4"),
    ):  # fmt: skip
        with pytest.raises(PrecisionError) as caught:
            parse_policy(typed)
        assert f"unknown precision policy {typed!r}, did you mean '{meant}" in str(caught.value)
        assert all(name in str(caught.value) for name in POLICIES)


def test_a_field_string_fills_in_what_follows():
    def check(spec, name):
        assert parse_policy(spec) == POLICIES[name]

    every(
        [
            ("params=fp32", "fp32"),
            ("compute=tf32", "tf32"),
            ("params=fp32,compute=bf16", "bf16-mixed"),
            ("compute=fp16", "fp16-mixed"),
            ("params=bf16", "bf16-master"),
            ("params=fp16", "fp16-master"),
            ("params=bf16,master=bf16", "bf16-pure"),
            (" params = fp16 , master = fp16 ", "fp16-pure"),
            (
                "params=fp16,master=fp16,grad=fp16,reduce=fp16,output=fp32,scale=dynamic",
                "fp16-pure",
            ),
            ("params=bf16,update=split", "bf16-split"),
            ("params=bf16,master=fp32,update=split24", "bf16-split24"),
            ("params=bf16,update=kahan", "bf16-kahan"),
            ("params=bf16,update=stochastic,grad=fp32", "bf16-sr"),
            ("bf16-kahan,moments=bf16", "bf16-kahan"),
            ("bf16-master,update=split", "bf16-split"),
        ],
        check,
    )


def test_fields_after_a_name_change_that_policy():
    for text, moments in (("bf16-split,moments=8bit", "8bit"), ("bf16-sr,moments=fp32", "fp32")):
        assert parse_policy(text) == replace(POLICIES[text.split(",")[0]], moments=moments)
        assert str(parse_policy(text)) == text
    for text in ("fp16-mixed,init_scale=1024,growth_interval=1", "fp32,scale=static,init_scale=8",
                 "fp16-mixed,scale=static", "fp16-master,moments=8bit,min_scale=2"):  # fmt: skip
        assert str(parse_policy(text)) == text
    long = "params=fp32,compute=fp16,output=fp32,grad=fp32,reduce=fp32,master=fp32,scale=dynamic"
    assert parse_saved(f"{long},init_scale=1024.0") == parse_policy("half,init_scale=1024")
    assert [parse_saved(text) for text in ("nonsense", None)] == [None] * 2
    assert parse_policy("half , hysteresis=2").loss_scale.hysteresis == 2


def test_a_bad_field_string_is_refused_with_its_reason():
    def check(spec, message):
        with pytest.raises(PrecisionError, match=message):
            parse_policy(spec)

    every(
        [
            ("param=bf16", "unknown policy key 'param', did you mean 'params'.*Allowed: params, c"),
            ("mxfp8,recpie=nvfp4", "did you mean 'recipe'"),
            ("params=bf16,", "unknown policy key ''"),
            ("params=bf16, params =fp16", "gives a key twice"),
            ("params=tf32", "params=tf32; allowed: fp32, bf16, fp16$"),
            ("compute=half", "compute=half; allowed: fp32, bf16, fp16, tf32"),
            ("bf16-split,moments=4bit", "moments=4bit; allowed: master, fp32, bf16, 8bit"),
            ("compute=fp16,scale=auto", "'auto'; allowed: none, static, dynamic"),
            ("compute=fp16,init_scale=3", "init_scale is 3.0; allowed: powers of two"),
            ("compute=bf16,init_scale=8", "init_scale given, but the loss is not scaled"),
            ("params=bf16,compute=tf32", "compute"),
            ("output=bf16", "output=bf16: the loss is always computed in fp32"),
            ("bf16-mixed,recipe=mxfp9", "fprop=mxfp9; allowed: bf16, fp8"),
            ("mxfp8,rules=a:mxfp8/bf16", "three as fprop/dgrad/wgrad"),
            ("fp16-mixed,recipe=mxfp8", "as bf16-mixed or bf16-split"),
            ("mxfp8,simulate=perhaps", "allowed: yes, no"),
            ("bf16-mixed,rules=a:fp16", "allowed: fp32, bf16, or a recipe such as mxfp8"),
            ("bf16,keep_fp32=", "rule ''; allowed: a glob"),
            ("bf16,keep_fp32=a b", "rule 'a b'; allowed: a glob"),
            ("fp32,rules=a:bf16", "rule 'a' -> bf16; allowed: fp32$"),
            ("tf32,keep_fp32=a", "rounds to tf32 for the whole process"),
        ],
        check,
    )


# For each field two policies that agree in what is spelled before it and differ there.
DIFFER = {
    "param_dtype": ("bf16-mixed", "bf16-master"),
    "compute_dtype": ("fp32", "bf16-mixed"),
    "output_dtype": None,  # fp32 alone is allowed
    "grad_dtype": ("bf16-master", "bf16-pure"),
    "reduce_dtype": ("bf16-mixed", "bf16-mixed,reduce=bf16"),
    "master_dtype": ("bf16-split", "bf16-kahan"),
    "update": ("bf16-split", "bf16-split24"),
    "moments": ("bf16-split", "bf16-split,moments=8bit"),
    "casts": ("bf16-mixed", "bf16-module"),
    "tf32": ("fp32", "tf32"),
    "loss_scale": (
        "fp16-mixed",
        "fp16-mixed,init_scale=1024,min_scale=2,max_scale=4096,hysteresis=2,"
        "growth_factor=4,backoff_factor=0.25,growth_interval=3,max_consecutive_skips=5",
    ),
    "rules": ("bf16-mixed", "bf16-mixed,keep_fp32=*.norm"),
    "recipe": ("bf16-mixed", "bf16-mixed,recipe=mxfp8/bf16/bf16"),
    "simulate": ("nvfp4", "nvfp4,simulate=yes"),
}


@pytest.mark.parametrize("name", [field.name for field in fields(PrecisionPolicy)])
def test_no_field_is_lost_in_a_spelling_or_left_out_of_an_explanation(name):
    if DIFFER[name] is None:
        return
    one, other = map(parse_policy, DIFFER[name])
    assert getattr(one, name) != getattr(other, name)
    assert explain_policy(one) != explain_policy(other)
    for policy in (one, other):
        spelled = _spell(policy)
        assert parse_policy(spelled) == parse_policy(str(policy)) == policy
        assert (getattr(policy, name) == getattr(one, name)) == (spelled == _spell(one))


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
