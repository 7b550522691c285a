"""Dropout by key, hashed n-grams, attention and pooling against their definitions."""

import math

import numpy as np
import pytest
import torch

from halfstep.trainer.models.encoder.config import EncoderConfig
from halfstep.trainer.models.encoder.encoder import (
    Head,
    KeyedDropout,
    NgramBag,
    SelfAttention,
    mix,
    pool,
)

CONFIG = EncoderConfig(
    labels=("no", "yes"),
    vocab_size=11,
    max_length=9,
    n_layer=1,
    n_head=2,
    n_embd=8,
    ngram_buckets=97,
)


def keys(n, seed=0):
    return torch.randint(0, 2**63 - 1, (n,), generator=torch.Generator().manual_seed(seed))


# --- the hash ------------------------------------------------------------------------------------


def test_mix_is_lowbias32():
    def oracle(x):
        x = np.uint32(x)
        with np.errstate(over="ignore"):
            x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
            x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return int(x ^ (x >> np.uint32(16)))

    values = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 123456789]
    assert mix(torch.tensor(values)).tolist() == [oracle(v) for v in values]


def test_mix_reads_the_low_32_bits_of_any_number():
    x = torch.tensor([-1, 5 - 2**40, 2**62 + 7])
    assert mix(x).tolist() == mix(torch.tensor([0xFFFFFFFF, 5, 7])).tolist()


# --- dropout -------------------------------------------------------------------------------------


def test_dropped_shares_are_those_of_independent_draws():
    p, n, size = 0.3, 4000, 64
    dropped = KeyedDropout(p, 5).factors(keys(n), size) == 0
    # Means of n (or size) independent draws with variance p (1 - p): six standard deviations.
    spread = 6 * math.sqrt(p * (1 - p))
    assert abs(dropped.double().mean(0) - p).max() < spread / math.sqrt(n)
    assert abs(dropped.double().mean(1) - p).max() < spread / math.sqrt(size)
    # Correlations of independent columns have standard deviation 1/sqrt(n).
    columns = torch.corrcoef(dropped.double().T).fill_diagonal_(0.0)
    assert columns.abs().max() < 6 / math.sqrt(n)


@pytest.mark.parametrize("first", [range(1000, 1200), range(-1200, -1000)])
def test_neighbouring_keys_and_sites_are_independent(first):
    near = torch.tensor(list(first))
    size = 4096
    masks = [KeyedDropout(0.5, site).factors(near, size) == 0 for site in (-2, -1, 0, 1)]
    every = torch.cat(masks).double()
    rows = torch.corrcoef(every).fill_diagonal_(0.0)
    # 800 rows: 320,000 pairs, whose largest is near 4.8 standard deviations of 1/sqrt(size).
    assert rows.abs().max() < 7 / math.sqrt(size)


def test_high_bits_of_a_key_count():
    low = torch.tensor([5])
    dropout = KeyedDropout(0.5, 0)
    assert not torch.equal(dropout.factors(low, 64), dropout.factors(low + 2**40, 64))


def test_a_row_follows_its_key_alone():
    dropout = KeyedDropout(0.4, 2)
    k = keys(6)
    x = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))
    whole = dropout(x, k)
    torch.manual_seed(99)
    order = torch.tensor([4, 1, 5])
    assert torch.equal(dropout(x[order], k[order]), whole[order])
    # More positions change nothing of the first.
    longer = torch.cat((x, x), dim=1)
    assert torch.equal(dropout(longer, k)[:, :5], whole)
    by_position = KeyedDropout(0.4, 2, positions=True)
    assert torch.equal(by_position(longer, k)[:, :5], by_position(x, k))


def test_features_or_positions_are_dropped_as_a_whole_and_the_rest_is_scaled():
    x = torch.ones(50, 6, 8, dtype=torch.float64)
    features = KeyedDropout(0.25, 0)(x, keys(50))
    assert (features == features[:, :1]).all()
    positions = KeyedDropout(0.25, 0, positions=True)(x, keys(50))
    assert (positions == positions[:, :, :1]).all()
    for y in (features, positions):
        assert set(y.unique().tolist()) == {0.0, 1 / 0.75}
    pooled = KeyedDropout(0.25, 0)(x[:, 0], keys(50))
    assert torch.equal(pooled, features[:, 0])


def test_nothing_is_dropped_with_key_minus_one_in_evaluation_or_with_p_0():
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    k = keys(3)
    k[1] = -1
    dropout = KeyedDropout(0.5, 0)
    y = dropout(x, k)
    assert torch.equal(y[1], x[1])
    assert not torch.equal(y[0], x[0])
    assert torch.equal(KeyedDropout(0.0, 0)(x, k), x)
    assert torch.equal(dropout.eval()(x, k), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_once(dtype):
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    dropout = KeyedDropout(0.3, 0)
    want = (x.double() * dropout.factors(keys(3), 8).unsqueeze(1)).to(dtype)
    y = dropout(x, keys(3))
    assert y.dtype == dtype
    # The product is rounded to fp32 first: only a tie there could differ, and none does here.
    assert torch.equal(y, want)


# --- n-grams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_a_bucket_is_a_function_of_the_last_n_tokens(order):
    ngram = NgramBag(CONFIG, order, 0)
    g = torch.Generator().manual_seed(0)
    a = torch.randint(0, 11, (20, 9), generator=g)
    b = torch.randint(0, 11, (20, 9), generator=g)
    b[:, 9 - order :] = a[:, 9 - order :]
    assert torch.equal(ngram.bucket(a)[:, 8], ngram.bucket(b)[:, 8])
    b[:, 9 - order] = (a[:, 9 - order] + 1) % 11
    differs = ngram.bucket(a)[:, 8] != ngram.bucket(b)[:, 8]
    # Two n-grams share one of 97 buckets once in 97.
    assert differs.float().mean() > 0.8


def test_tokens_before_the_text_are_0():
    ngram = NgramBag(CONFIG, 3, 0)
    ids = torch.tensor([[4, 7, 2]])
    longer = torch.tensor([[0, 0, 4, 7, 2]])
    assert torch.equal(ngram.bucket(ids), ngram.bucket(longer)[:, 2:])


def test_buckets_are_evenly_filled_by_frequent_neighbours():
    config = EncoderConfig(
        labels=("no", "yes"), vocab_size=9000, max_length=9, n_layer=1, n_head=1, n_embd=4,
        ngram_buckets=1024,
    )  # fmt: skip
    ids = torch.cartesian_prod(torch.arange(4, 324), torch.arange(4, 324))
    rows = NgramBag(config, 2, 0).bucket(ids)[:, 1]
    counts = torch.bincount(rows, minlength=1024).double()
    # 102,400 pairs at random: 100 a bucket, with a standard deviation of 10.
    assert counts.std() == pytest.approx(10, rel=0.15)
    assert abs(counts - 100).max() < 60


def test_a_bag_is_the_scaled_sum_over_real_positions_by_the_root_of_their_number():
    bag = NgramBag(CONFIG, 2, 0).double().eval()
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (3, 6), generator=g)
    lengths = [6, 4, 1]
    mask = torch.arange(6) < torch.tensor(lengths).unsqueeze(1)
    want = []
    for i, n in enumerate(lengths):
        rows = [int(bag.bucket(ids)[i, t]) for t in range(n)]
        want.append(CONFIG.ngram_scale * sum(bag.table.weight[r] for r in rows) / math.sqrt(n))
    found = bag(ids, mask, keys(3))
    # fp64 rounding of sums of six terms near 1.
    torch.testing.assert_close(found, torch.stack(want), rtol=0, atol=1e-14)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bag_is_an_fp32_island(autocast):
    bag = NgramBag(CONFIG, 2, 0).bfloat16()
    ids = torch.randint(0, 11, (2, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 300, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = bag(ids, mask, keys(2))
    assert found.dtype == torch.float32
    # fp32 sums of 300 numbers near 1: a few dozen fp32 units.
    torch.testing.assert_close(found.double(), bag.double()(ids, mask, keys(2)), rtol=0, atol=1e-4)


# --- attention, pooling, head --------------------------------------------------------------------


def test_attention_is_softmax_of_products_over_real_positions():
    g = torch.Generator().manual_seed(3)
    attention = SelfAttention(CONFIG).double()
    x = torch.randn(2, 5, 8, generator=g, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    q, k, v = (
        torch.einsum("btc,hdc->bhtd", x, w) + b[None, :, None]
        for w, b in zip(
            attention.qkv.weight.view(2, 3, 4, 8).unbind(1),
            attention.qkv.bias.view(2, 3, 4).unbind(1),
            strict=True,
        )
    )
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / 2.0  # sqrt(D), D = 4
    weights = scores.masked_fill(~mask[:, None, None], -math.inf).softmax(-1)
    y = torch.einsum("bhts,bhsd->bthd", weights, v).flatten(2)
    want = y @ attention.proj.weight.T + attention.proj.bias
    # fp64 rounding of sums of a dozen terms near 1.
    torch.testing.assert_close(attention(x, mask), want, rtol=0, atol=1e-14)


def test_pool_is_mean_and_maximum_of_real_positions():
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [True, True, False, False], [True, False, False, False]])
    want = [torch.cat((x[i, m].mean(0), x[i, m].amax(0))) for i, m in enumerate(mask)]
    torch.testing.assert_close(pool(x, mask), torch.stack(want), rtol=0, atol=1e-15)  # fp64


@pytest.mark.parametrize("autocast", [False, True])
def test_pool_and_head_are_fp32_islands(autocast):
    x = torch.randn(2, 300, 8, generator=torch.Generator().manual_seed(0)).add(3).bfloat16()
    head = Head(16, 3).bfloat16()
    mask = torch.ones(2, 300, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        pooled = pool(x, mask)
        logits = head(pooled)
    assert (pooled.dtype, logits.dtype) == (torch.float32, torch.float32)
    exact = pool(x.double(), mask)
    # fp32 sums of 300 numbers near 3: a few dozen fp32 units; bf16 sums would be off by 1e-2.
    torch.testing.assert_close(pooled.double(), exact, rtol=1e-5, atol=0)
    want = exact @ head.weight.double().T + head.bias.double()
    torch.testing.assert_close(logits.double(), want, rtol=0, atol=1e-5)  # fp32, 16 terms near 3
