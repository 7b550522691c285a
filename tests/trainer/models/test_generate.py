"""Generation: what is drawn, from what, and how often the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from halfstep.errors import NonFiniteError
from halfstep.trainer.models.gpt.gpt import GPT, GPTConfig
from halfstep.trainer.models.language_model import generate, sample

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=23)


@pytest.fixture(scope="module")
def model():
    """A model whose logits spread over several nats, so that draws differ and greedy is clear."""
    model = GPT(SMALL, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p *= 8.0
    return model


@pytest.fixture
def prompt():
    return torch.randint(0, 23, (3, 4), generator=torch.Generator().manual_seed(0))


# --- generate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [0, 1, 5, 20])
def test_the_prompt_comes_back_with_new_tokens_behind(model, prompt, new):
    text = generate(model, prompt, max_new_tokens=new, seed=1)
    assert text.shape == (3, 4 + new)
    assert text.dtype == torch.int64
    assert torch.equal(text[:, :4], prompt)
    assert text.min() >= 0
    assert text.max() < 23


def test_one_seed_one_text_and_the_global_state_is_untouched(model, prompt):
    state = torch.random.get_rng_state()
    a = generate(model, prompt, max_new_tokens=20, seed=5)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(123)
    assert torch.equal(a, generate(model, prompt, max_new_tokens=20, seed=5))
    assert not torch.equal(a, generate(model, prompt, max_new_tokens=20, seed=6))


def test_a_row_depends_on_its_prompt_and_place_alone(model, prompt):
    together = generate(model, prompt, max_new_tokens=20, seed=5)
    for b in range(3):
        alone = generate(model, prompt[b : b + 1], max_new_tokens=20, seed=5 + b)
        assert torch.equal(together[b], alone[0])


def test_greedy_takes_the_most_probable_of_the_last_window(model, prompt):
    text = generate(model, prompt, max_new_tokens=20, temperature=0)  # beyond block_size 12
    model.eval()
    for t in range(4, 24):
        with torch.no_grad():
            logits = model(text[:, max(0, t - 12) : t])[:, -1]
        assert torch.equal(logits.argmax(-1), text[:, t])


def test_top_k_1_and_tiny_temperature_are_greedy(model, prompt):
    greedy = generate(model, prompt, max_new_tokens=20, temperature=0)
    for how in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-38}, {"temperature": 1e-60}):
        assert torch.equal(greedy, generate(model, prompt, max_new_tokens=20, seed=3, **how))


def test_a_prompt_longer_than_the_model_is_cropped_to_its_end(model):
    long = torch.randint(0, 23, (2, 30), generator=torch.Generator().manual_seed(2))
    text = generate(model, long, max_new_tokens=6, seed=3)
    cropped = generate(model, long[:, -12:], max_new_tokens=6, seed=3)
    assert torch.equal(text[:, -6:], cropped[:, -6:])
    assert torch.equal(text[:, :30], long)


def test_rows_end_at_the_stop_token(model, prompt):
    free = generate(model, prompt, max_new_tokens=8, seed=5)
    stop = int(free[0, 5])  # the second new token of row 0
    text = generate(model, prompt, max_new_tokens=8, seed=5, stop_token=stop)
    for row, full in zip(text.tolist(), free.tolist(), strict=True):
        end = full.index(stop, 4) + 1 if stop in full[4:] else len(full)
        assert row[:end] == full[: min(end, len(row))]
        assert all(token == stop for token in row[end:])
    assert (text[0, 5:] == stop).all()
    one = generate(model, prompt[:1], max_new_tokens=8, seed=5, stop_token=stop)
    assert one.shape == (1, one[0].tolist().index(stop, 4) + 1)  # ends when all rows have


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_restored_even_after_an_error(prompt, training):
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=9, vocab_size=23, dropout=0.5))
    model.train(training)
    generate(model, prompt, max_new_tokens=2)
    assert model.training == training
    with torch.no_grad():
        model.final_norm.bias[0] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or inf") as caught:
        generate(model, prompt, max_new_tokens=2)
    assert caught.value.cause == "forward"
    assert model.training == training


def test_generation_works_under_autocast_and_in_16_bits(model, prompt):
    with torch.autocast("cpu", torch.bfloat16):
        assert generate(model, prompt, max_new_tokens=3, seed=1).shape == (3, 7)
    half = GPT(SMALL, seed=1).bfloat16()
    assert generate(half, prompt, max_new_tokens=3, seed=1).shape == (3, 7)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", -1),
    ],
)
def test_an_argument_out_of_range_is_named(model, prompt, argument, value):
    with pytest.raises(ValueError, match=argument):
        generate(model, prompt, **{"max_new_tokens": 2, argument: value})


# --- sample --------------------------------------------------------------------------------------


def allowed_by_definition(logits, temperature, top_k, top_p):
    """Tokens that may be drawn, with their probabilities in fp64, by sorting and counting."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or len(logits)]
    weights = np.exp((np.array([logits[i] for i in order]) - logits[order[0]]) / temperature)
    p = weights / weights.sum()
    kept = len(order)
    if top_p is not None:
        kept = next(n for n in range(1, len(p) + 1) if p[:n].sum() >= top_p or n == len(p))
    return dict(zip(order[:kept], p[:kept] / p[:kept].sum(), strict=True))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda i: i / 3), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.one_of(st.none(), st.integers(1, 14)),
    top_p=st.one_of(st.none(), st.floats(0.05, 1.0)),
)
def test_the_drawn_tokens_are_those_of_the_definition(logits, temperature, top_k, top_p):
    want = allowed_by_definition(np.array(logits), temperature, top_k, top_p)
    # A grid of uniform numbers inverts the whole distribution: n / 2000 of them give each token.
    grid = (torch.arange(2000) + 0.5) / 2000
    drawn = sample(torch.tensor([logits]).expand(2000, -1), grid, temperature, top_k, top_p)
    got = torch.bincount(drawn, minlength=len(logits)) / 2000
    # A set of which the last member decides by rounding (sum and top_p equal to 1e-6) may differ by
    # that member; leave such cases out.
    if top_p is not None:
        full = sorted(allowed_by_definition(np.array(logits), temperature, top_k, None).values())
        sums = np.cumsum(full[::-1])
        if np.abs(sums - top_p).min() < 1e-6:
            return
    for token in range(len(logits)):
        # One grid step at each end of a token's interval.
        assert abs(got[token].item() - want.get(token, 0.0)) <= 2 / 2000
        if token not in want:
            assert got[token] == 0


def test_the_ends_of_the_uniform_range_stay_inside_the_kept_set():
    logits = torch.tensor([[0.0, 5.0, -90.0, 4.0, -torch.finfo().max]])
    below_one = torch.tensor([1 - 2.0**-24])
    one = torch.ones(1)  # as if the product with the total had been rounded up to it
    assert sample(logits, one, top_k=2).item() == 3
    assert sample(logits, one, top_p=0.5).item() == 1
    assert sample(logits, one).item() == 2
    assert sample(torch.zeros(1, 2), torch.tensor([0.5])).item() == 1  # intervals are [from, to)
    assert sample(logits, torch.zeros(1)).item() == 1
    assert sample(logits, below_one, top_k=2).item() == 3
    assert sample(logits, below_one, top_p=0.5).item() == 1
    assert sample(logits, below_one).item() in (0, 2)  # never the token of probability 0
