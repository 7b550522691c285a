"""Hugging Face architectures, unchanged, through every mechanism: twelve steps and what is kept.

The loss is the model's own: ``labels`` are in the batch, which is fixed and random, so that some
steps learn it by heart. The quick tier takes the mechanisms in turn, each architecture through one
of them; the rest is ``slow``.
"""

from __future__ import annotations

import copy
import math
import re
from functools import cache, partial

import pytest
import torch
import transformers

import halfstep
from halfstep.optim import AdamW

# transformers says so of GPT-2's own configuration
pytestmark = pytest.mark.filterwarnings("ignore:.*loss_type:UserWarning")

ROWS, LENGTH, WORDS, SIDE, STEPS = 4, 10, 61, 16, 12
SHAPE = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip
KINDS = {  # class, and what its configuration has
    "bert": ("BertForSequenceClassification", {**SHAPE, "num_labels": 3}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": WORDS, "n_positions": 16, "n_embd": 32,
                                 "n_layer": 2, "n_head": 4, "pad_token_id": 0}),
    "llama": ("LlamaForCausalLM", {**SHAPE, "num_key_value_heads": 2}),
    "t5": ("T5ForConditionalGeneration", {
        "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
        "num_decoder_layers": 1, "num_heads": 4, "pad_token_id": 0, "decoder_start_token_id": 0,
    }),
    "resnet": ("ResNetForImageClassification", {
        "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 3,
    }),
}  # fmt: skip
TIED = {
    "gpt2": [("lm_head.weight", "transformer.wte.weight")],
    "t5": [(f"{side}.embed_tokens.weight", "shared.weight") for side in ("encoder", "decoder")],
}
MECHANISMS = ["fp16-master", "bf16-mixed", "bf16-split", "bf16-pure", "fp32"]
PAIRS = [
    pytest.param(n, p, marks=[pytest.mark.slow] * (p != MECHANISMS[i]), id=f"{n}-{p}")
    for i, n in enumerate(KINDS)
    for p in MECHANISMS
]


def batch_of(name):
    g = torch.Generator().manual_seed(0)
    if name == "resnet":
        images = torch.randn(ROWS, 3, SIDE, SIDE, generator=g)
        return {"pixel_values": images, "labels": torch.arange(ROWS) % 3}
    words = torch.randint(4, WORDS, (ROWS, LENGTH), generator=g)
    mask = torch.ones_like(words)
    mask[1, -3:] = 0  # padded at its end
    targets = torch.arange(ROWS) % 3 if name == "bert" else torch.where(mask == 1, words, -100)
    return {"input_ids": words, "attention_mask": mask, "labels": targets}


def begin(name, policy):
    kind, values = KINDS[name]
    made = getattr(transformers, kind.partition("For")[0].partition("LM")[0] + "Config")(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = getattr(transformers, kind)(made).train()
    value = halfstep.parse_policy(policy)
    optimizer_class = partial(AdamW, seed=3) if value.needs_own_optimizer else torch.optim.AdamW
    eps = 1e-6 if value.is_pure else 1e-8
    # the norms of four rows make much of every rounding
    optimizer = optimizer_class(model.parameters(), lr=1e-3 if name == "resnet" else 3e-3, eps=eps)
    if name == "resnet" and value.param_dtype != torch.float32:
        policy += ",keep_fp32=type:BatchNorm2d"
    return model, optimizer, halfstep.Precision(policy, model, optimizer)


def step(name, model, precision, number):
    torch.manual_seed(number)  # of dropout
    with precision.autocast():
        output = model(**batch_of(name))
    return precision.step(output.loss, max_norm=1.0)


@cache
def trained(name, policy):
    model, optimizer, precision = begin(name, policy)
    start = {key: master.detach().clone() for key, master in precision.masters.items()}
    results = [step(name, model, precision, number) for number in range(STEPS)]
    return model, optimizer, precision, start, results


@pytest.mark.parametrize(("name", "policy"), PAIRS)
def test_a_pair_trains_keeps_its_formats_and_resumes(name, policy):
    model, optimizer, precision, start, results = trained(name, policy)
    losses, applied = ([getattr(r, what) for r in results] for what in ("loss", "applied"))
    # one batch, learnt by heart
    assert losses[-1] < 0.9 * losses[0]
    assert sum(applied) == precision.progress.applied_total
    # a scale of 2^16 is at most 2^6 too large for gradients of losses near 1
    assert STEPS - sum(applied) <= (6 if policy.startswith("fp16") else 0)
    if policy != "fp32" and not precision.policy.is_pure:
        expected = [result.loss for result in trained(name, "fp32")[-1]]
        # Each of some 64 operations in a row rounds by up to half an eps, at random: 8 times that.
        bound = 8 * torch.finfo(precision.policy.compute_dtype).eps / 2
        assert losses[0] == pytest.approx(expected[0], rel=bound)
        if all(applied):  # a skipped step puts the curve behind by one
            worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            assert worst < bound * expected[0]

    idle = {key for key, now in precision.masters.items() if torch.equal(now, start[key])}
    assert len(idle) < len(start) / 2
    # an update at 1.0 is lost in pure 16 bits; the true gradient of a key's bias is 0, as softmax
    # ignores one number added to all scores
    named = precision.named_parameters()
    idle = {key for key in idle if not re.search(r"k(ey|_proj)\.bias$", key)}
    assert precision.policy.is_pure or not {k for k in idle if named[k] in optimizer.state}

    with torch.no_grad(), precision.autocast():
        output = model(**batch_of(name), output_hidden_states=True)
    assert output["loss"] is output.loss is output[0]  # by key, attribute and place
    found = [output.loss, output.logits, *(output.get("hidden_states") or ())]
    assert {tensor.dtype for tensor in found} == {torch.float32}
    assert all(math.isfinite(tensor.sum()) for tensor in found)

    states = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, precision)]
    fresh = begin(name, policy)
    for part, state in zip(fresh, states, strict=True):
        part.load_state_dict(state)
    again = step(name, fresh[0], fresh[2], STEPS)
    assert again == step(name, model, precision, STEPS)
    now = dict(precision.masters.items())
    assert all(torch.equal(master, now[key]) for key, master in fresh[2].masters.items())
    weights = dict(fresh[0].named_parameters(remove_duplicate=False))
    for one, other in TIED.get(name, []):
        assert weights[one] is weights[other]
