"""Generation through transformers: the ids of a loop by hand, no wishes of the model's author."""

from __future__ import annotations

import json

import pytest
import torch
from tests.trainer.models.pretrained_folders import save_lm, silence

from halfstep.errors import ConfigError, NonFiniteError
from halfstep.trainer.models.pretrained.lm import generate_ids, open_causal_lm
from halfstep.trainer.models.pretrained.lora import add_lora

PROMPT = [5, 9, 33, 7]


@pytest.fixture(scope="module", params=["GPT2", "Llama", "Qwen2"])
def lm(request, tmp_path_factory):
    return open_causal_lm(save_lm(tmp_path_factory.mktemp("m"), request.param)).eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return open_causal_lm(save_lm(tmp_path_factory.mktemp("m"), "Llama")).eval()


@torch.no_grad()
def by_hand(lm, prompt, count):
    """The likeliest id each time, without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(lm.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_temperature_0_is_the_greedy_loop(lm):
    state = torch.get_rng_state()
    with silence():
        found = generate_ids(lm, PROMPT, max_new_tokens=12, temperature=0)
    assert found == by_hand(lm, PROMPT, 12)
    assert torch.equal(torch.get_rng_state(), state)
    assert not lm.training


def test_adapters_take_part(tmp_path):
    lora = add_lora(
        open_causal_lm(save_lm(tmp_path / "m", "Llama")), dropout=0.5, targets=["up_proj"]
    )
    plain = generate_ids(lora, PROMPT, max_new_tokens=12, temperature=0)
    with torch.no_grad():
        for parameter in lora.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator()))
    assert lora.training
    found = generate_ids(lora, PROMPT, max_new_tokens=12, temperature=0)
    assert lora.training
    lora.eval()
    assert found == by_hand(lora, PROMPT, 12) != plain


def test_draws_follow_the_seed_alone(lm):
    options = {"max_new_tokens": 12, "temperature": 1.0}
    torch.manual_seed(1)
    one = generate_ids(lm, PROMPT, seed=3, **options)
    torch.manual_seed(2)
    assert generate_ids(lm, PROMPT, seed=3, **options) == one
    assert generate_ids(lm, PROMPT, seed=4, **options) != one
    assert generate_ids(lm, PROMPT, seed=3, **{**options, "top_k": 1}) == by_hand(lm, PROMPT, 12)
    assert generate_ids(lm, PROMPT, seed=3, **{**options, "top_p": 1e-9}) == by_hand(lm, PROMPT, 12)
    assert generate_ids(lm, PROMPT, seed=3, **{**options, "temperature": 1e-6}) == by_hand(
        lm, PROMPT, 12
    )


def test_draws_have_the_models_probabilities(llama):
    """All ids, none left out: the default of transformers would be the 50 likeliest."""
    with torch.no_grad():
        p_V = (llama.logits(torch.tensor([PROMPT]))[0, -1] / 8.0).softmax(-1).double()
    draws = 250
    counts_V = torch.zeros_like(p_V)
    for seed in range(draws):
        (drawn,) = generate_ids(llama, PROMPT, max_new_tokens=1, temperature=8.0, seed=seed)
        counts_V[drawn] += 1
    # Five standard deviations of each binomial, and one draw for the rare ones.
    assert bool(((counts_V - draws * p_V).abs() <= 5 * (draws * p_V).sqrt() + 1).all())
    tail_V = p_V.sort(descending=True).indices[50:]
    mass = float(p_V[tail_V].sum()) * draws
    assert mass > 30
    assert abs(float(counts_V[tail_V].sum()) - mass) < 5 * mass**0.5


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
    assert wishful.core.generation_config.repetition_penalty == 3.0
    with silence():
        assert generate_ids(wishful, PROMPT, max_new_tokens=12, temperature=0) == greedy
    a, b = (generate_ids(m, PROMPT, max_new_tokens=9, temperature=3.0) for m in (plain, wishful))
    assert a == b
    assert wishful.core.generation_config.repetition_penalty == 3.0  # as it was


def test_it_stops_at_an_end_and_leaves_it_out(llama):
    greedy = by_hand(llama, PROMPT, 12)
    ends = [greedy[2:3], greedy[4:6]]
    first = min(greedy.index(greedy[2]), 4)
    found = generate_ids(llama, PROMPT, max_new_tokens=12, temperature=0, ends=[[], *ends])
    assert found == greedy[:first]
    two = generate_ids(llama, PROMPT, max_new_tokens=12, temperature=0, ends=[greedy[4:6]])
    assert two == greedy[:4]
    none = generate_ids(llama, PROMPT, max_new_tokens=12, temperature=0, ends=[PROMPT[-1:] * 9])
    assert none == greedy


def test_the_end_of_the_prompt_is_no_end(llama):
    greedy = by_hand(llama, PROMPT, 3)
    end = [PROMPT[-1], greedy[0]]  # half of it stands in the prompt
    assert generate_ids(llama, PROMPT, max_new_tokens=3, temperature=0, ends=[end]) == greedy


def test_it_writes_as_far_as_the_positions_go(lm):
    assert lm.max_length == 40
    long = [3 + i % 50 for i in range(38)]
    assert len(generate_ids(lm, long, max_new_tokens=99, temperature=0)) == 2
    assert generate_ids(lm, long, max_new_tokens=0) == []
    with pytest.raises(ConfigError, match="the prompt has 40 tokens and the model 40 positions"):
        generate_ids(lm, [*long, 3, 3], max_new_tokens=1)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_weights_that_are_not_finite(tmp_path, temperature):
    lm = open_causal_lm(save_lm(tmp_path / "m", "Llama"))
    with torch.no_grad():
        lm.core.lm_head.weight[5, 0] = float("nan")
    before = lm.core.generation_config
    with pytest.raises(NonFiniteError, match="logits hold NaN or inf"):
        generate_ids(lm, PROMPT, max_new_tokens=3, temperature=temperature)
    assert lm.core.generation_config is before
    assert lm.training


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more, got -1"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], or None for all tokens, got 1.5"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*63\)"),
        ({"prompt": []}, "the prompt has 0 tokens"),
    ],
)
def test_arguments_out_of_range(llama, change, words):
    options = {"prompt": PROMPT, "max_new_tokens": 3, **change}
    with pytest.raises(ConfigError, match=words):
        generate_ids(llama, options.pop("prompt"), **options)
