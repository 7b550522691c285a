"""Generation: what is drawn, from what, and how often the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from halfstep.trainer.models.gpt import GPT, GPTConfig, generate, sample

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=23)
PROMPT = [7, 0, 22, 3]


@pytest.fixture(scope="module")
def model():
    """A model whose logits spread over several nats, so that draws differ and greedy is clear."""
    model = GPT(SMALL, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p *= 8.0
    return model


def test_one_seed_one_text_and_the_global_state_is_untouched(model):
    state = torch.random.get_rng_state()
    a = generate(model, PROMPT, max_new_tokens=20, seed=5)
    assert torch.equal(state, torch.random.get_rng_state())
    assert (len(a), a[:4]) == (24, PROMPT)
    torch.manual_seed(123)
    assert a == generate(model, PROMPT, max_new_tokens=20, seed=5)
    assert a != generate(model, PROMPT, max_new_tokens=20, seed=6)
    assert generate(model, PROMPT, max_new_tokens=0) == PROMPT


def test_greedy_takes_the_most_probable_of_the_last_window(model):
    text = generate(model, PROMPT, max_new_tokens=20, temperature=0)  # beyond block_size 12
    model.eval()
    for t in range(4, 24):
        with torch.no_grad():
            logits = model(torch.tensor([text[max(0, t - 12) : t]]))[0, -1]
        assert logits.argmax() == text[t]
    for tiny in (1e-38, 1e-60):
        assert text == generate(model, PROMPT, max_new_tokens=20, seed=3, temperature=tiny)


def test_it_ends_after_the_stop_token(model):
    free = generate(model, PROMPT, max_new_tokens=8, seed=5)
    text = generate(model, PROMPT, max_new_tokens=8, seed=5, stop_token=free[5])
    assert text == free[: free.index(free[5], 4) + 1]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda i: i / 3), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_the_drawn_tokens_are_those_of_the_definition(logits, temperature):
    weights = np.exp((np.array(logits) - max(logits)) / temperature)
    # A grid of uniform numbers inverts the whole distribution: n / 500 of them give each token.
    drawn = [sample(torch.tensor(logits), (n + 0.5) / 500, temperature) for n in range(500)]
    got = np.bincount(drawn, minlength=len(logits)) / 500
    # One grid step at each end of a token's interval.
    assert (np.abs(got - weights / weights.sum()) <= 2 / 500).all()


def test_the_ends_of_the_uniform_range_stay_inside_the_possible_tokens():
    logits = torch.tensor([0.0, 5.0, -90.0, 4.0, -torch.finfo().max])
    assert sample(logits, 0.0, 1.0) == 1
    assert sample(logits, 1 - 2.0**-24, 1.0) in (0, 2)  # never the token of probability 0
    assert sample(logits, 1.0, 1.0) == 2  # as if the product with the total were rounded up to it
    assert sample(torch.zeros(2), 0.5, 1.0) == 1  # intervals are [from, to)
