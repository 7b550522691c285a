"""Which combinations are policies, and that any text is one or an error of ours."""

import torch
from hypothesis import given, strategies as st

from halfstep import PrecisionError, PrecisionPolicy, parse_policy

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


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
