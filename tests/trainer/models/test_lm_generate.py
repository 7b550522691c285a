"""Generation through transformers: the ids of a loop by hand, no wishes of the model's author."""

from __future__ import annotations

import json

import pytest
import torch
from tests.trainer.models.pretrained_folders import save_lm, silence

from halfstep.errors import ConfigError, NonFiniteError
from halfstep.trainer.models.causal_lm import generate_ids, open_causal_lm

PROMPT = [5, 9, 33, 7]


@pytest.fixture(scope="module", params=["GPT2", "Llama"])
def lm(request, tmp_path_factory):
    return open_causal_lm(save_lm(tmp_path_factory.mktemp("m"), request.param)).eval()


@torch.no_grad()
def by_hand(lm, prompt, count):
    """The likeliest id each time, without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(lm.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_temperature_0_is_the_greedy_loop_and_draws_follow_the_seed_alone(lm):
    state = torch.get_rng_state()
    with silence():
        found = generate_ids(lm, PROMPT, max_new_tokens=12, temperature=0)
    assert found == by_hand(lm, PROMPT, 12)
    assert not lm.training
    options = {"max_new_tokens": 12, "temperature": 1.0}
    one = generate_ids(lm, PROMPT, seed=3, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert generate_ids(lm, PROMPT, seed=3, **options) == one
    assert generate_ids(lm, PROMPT, seed=4, **options) != one


def test_what_the_models_author_wished_is_not_used(tmp_path):
    folder = save_lm(tmp_path / "m", "Llama")
    plain = open_causal_lm(folder)
    greedy = generate_ids(plain, PROMPT, max_new_tokens=12, temperature=0)
    wishes = {
        "do_sample": True, "top_k": 1, "repetition_penalty": 3.0, "min_new_tokens": 9,
        "suppress_tokens": [greedy[0]], "eos_token_id": greedy[1], "max_length": 5,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(wishes))
    wishful = open_causal_lm(folder)
    with silence():
        assert generate_ids(wishful, PROMPT, max_new_tokens=12, temperature=0) == greedy
    a, b = (generate_ids(m, PROMPT, max_new_tokens=9, temperature=3.0) for m in (plain, wishful))
    assert a == b


def test_it_stops_at_an_end_and_leaves_it_out(lm):
    greedy = by_hand(lm, PROMPT, 12)
    options = {"max_new_tokens": 12, "temperature": 0}
    ends = [PROMPT[-1], greedy[4], greedy[2]]  # the first stands in the prompt
    first = min(i for i, token in enumerate(greedy) if token in ends)
    assert generate_ids(lm, PROMPT, ends=ends, **options) == greedy[:first]


def test_it_writes_as_far_as_the_positions_go(lm):
    long = [3 + i % 50 for i in range(38)]
    assert len(generate_ids(lm, long, max_new_tokens=99, temperature=0)) == lm.max_length - 38
    for prompt in ([*long, 3, 3], []):
        with pytest.raises(ConfigError, match=f"the prompt has {len(prompt)} tokens and the model"):
            generate_ids(lm, prompt, max_new_tokens=1)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_weights_that_are_not_finite(tmp_path, temperature):
    lm = open_causal_lm(save_lm(tmp_path / "m", "Llama"))
    with torch.no_grad():
        lm.core.lm_head.weight[5, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="logits hold NaN or inf"):
        generate_ids(lm, PROMPT, max_new_tokens=3, temperature=temperature)
