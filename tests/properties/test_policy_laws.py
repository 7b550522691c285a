"""Every valid policy can be written down and read back."""

import torch
from hypothesis import given, reject, settings, strategies as st

from halfstep import LossScaleConfig, PrecisionError, PrecisionPolicy, parse_policy

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def scales(draw):
    kind = draw(st.sampled_from(["none", "static", "dynamic"]))
    low = draw(st.integers(0, 8))
    start = draw(st.integers(low, 40))
    if kind == "none" and draw(st.booleans()):
        return LossScaleConfig()
    numbers = {
        "init_scale": 2.0**start,
        "min_scale": 2.0**low,
        "max_scale": 2.0 ** draw(st.integers(start, 126)),
        "growth_factor": draw(st.sampled_from([2.0, 4.0, 2.0**30])),
        "backoff_factor": draw(st.sampled_from([0.5, 0.25, 2.0**-30])),
        "growth_interval": draw(st.integers(1, 10**6)),
        "hysteresis": draw(st.integers(1, 5)),
        "max_consecutive_skips": draw(st.integers(1, 10**6)),
    }
    try:
        return LossScaleConfig(kind=kind, **numbers)
    except PrecisionError:
        if kind != "none":
            raise
        reject()  # numbers without a scale may be refused; if they are not, they must read back


@st.composite
def policies(draw):
    """All combinations that the law of the design allows, and none that it forbids."""
    params = draw(dtypes)
    low = params != torch.float32
    tf32 = not low and draw(st.booleans())
    compute = params if low or tf32 else draw(dtypes)
    master = draw(st.sampled_from([torch.float32, params]))
    return PrecisionPolicy(
        param_dtype=params,
        compute_dtype=compute,
        master_dtype=master,
        grad_dtype=master,
        reduce_dtype=draw(dtypes),
        tf32=tf32,
        loss_scale=draw(scales()),
    )


@settings(max_examples=200)
@given(policies())
def test_a_policy_reads_back_as_itself(policy):
    assert parse_policy(str(policy)) == policy


@given(st.lists(dtypes, min_size=6, max_size=6), st.booleans())
def test_a_combination_is_accepted_or_refused_by_the_rules_alone(six, tf32):
    params, compute, output, grad, reduce, master = six
    allowed = (
        output == torch.float32
        and (params == torch.float32 or compute == params)
        and master in (torch.float32, params)
        and grad == master
        and not (tf32 and {params, compute} != {torch.float32})
    )
    try:
        policy = PrecisionPolicy(
            param_dtype=params,
            compute_dtype=compute,
            output_dtype=output,
            grad_dtype=grad,
            reduce_dtype=reduce,
            master_dtype=master,
            tf32=tf32,
        )
    except PrecisionError:
        assert not allowed
    else:
        assert allowed
        assert policy.has_masters == (params != master)


@given(st.text(max_size=40))
def test_any_text_is_a_policy_or_a_precision_error(text):
    try:
        policy = parse_policy(text)
    except PrecisionError:
        return
    assert isinstance(policy, PrecisionPolicy)
