"""An encoder and decoder of Hugging Face, whose three tables are one: what it gives, and resumes.

Architectures by the dozen train under every policy in ``tests/strangers``.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import halfstep
from halfstep.optim import AdamW

CONFIG = transformers.T5Config(
    vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=1, num_heads=4,
    pad_token_id=0, decoder_start_token_id=0,
)  # fmt: skip
TIED = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]


def batch():
    words = torch.randint(4, 61, (4, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(words)
    mask[1, -3:] = 0  # padded at its end
    labels = torch.where(mask == 1, words, -100)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def begin(policy):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = transformers.T5ForConditionalGeneration(CONFIG).train()
    optimizer = AdamW(model.parameters(), lr=3e-3, seed=3)
    return model, optimizer, halfstep.Precision(policy, model, optimizer)


def step(model, precision, number):
    torch.manual_seed(number)  # of dropout
    with precision.autocast():
        output = model(**batch())
    return precision.step(output.loss, max_norm=1.0)


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-split"])
def test_it_learns_keeps_its_outputs_and_ties_and_resumes(policy):
    model, optimizer, precision = begin(policy)
    losses = [step(model, precision, number).loss for number in range(6)]
    assert losses[-1] < 0.9 * losses[0]  # one batch, learnt by heart
    with torch.no_grad(), precision.autocast():
        output = model(**batch(), output_hidden_states=True)
    assert output["loss"] is output.loss is output[0]  # by key, attribute and place
    found = [output.loss, output.logits, *output.encoder_hidden_states]
    assert {tensor.dtype for tensor in found} == {torch.float32}
    states = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, precision)]
    fresh = begin(policy)
    for part, state in zip(fresh, states, strict=True):
        part.load_state_dict(state)
    assert step(fresh[0], fresh[2], 6) == step(model, precision, 6)
    now = dict(precision.masters.items())
    assert all(torch.equal(master, now[key]) for key, master in fresh[2].masters.items())
    weights = dict(fresh[0].named_parameters(remove_duplicate=False))
    assert all(weights[name] is weights["shared.weight"] for name in TIED)
