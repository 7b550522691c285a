"""Generation: what is drawn, from what, and how often the same."""

from __future__ import annotations

import pytest
import torch

from halfstep.trainer.models.gpt import GPT, GPTConfig, generate

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


def test_draws_follow_the_probabilities_of_the_temperature(model):
    model.eval()
    with torch.no_grad():
        wanted = (model(torch.tensor([PROMPT]))[0, -1].double() / 2.0).softmax(-1)
    found = torch.zeros(23, dtype=torch.float64)
    for seed in range(800):
        found[generate(model, PROMPT, max_new_tokens=1, seed=seed, temperature=2.0)[-1]] += 1
    # 800 draws: a share is off by 0.018 at one standard deviation, here 4 of them
    assert (found / 800 - wanted).abs().max() < 0.07
