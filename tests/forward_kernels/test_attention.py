"""Attention against its definition in fp64, and beside torch's own kernel."""

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from every import every
from halfstep.kernels.attention import attention, fits

# (batch, heads, heads of keys, queries, keys, channels, causal, mask)
SHAPES = [
    (2, 3, 3, 256, 256, 64, True, None),
    (1, 2, 2, 100, 100, 64, True, None),
    (2, 4, 2, 77, 77, 32, True, None),
    (2, 2, 2, 33, 130, 48, False, None),
    (2, 2, 2, 130, 33, 48, True, None),
    (1, 2, 1, 65, 65, 128, True, None),
    (1, 8, 1, 20, 20, 16, False, None),
    (1, 1, 1, 1, 5, 64, False, None),
    (1, 1, 1, 5, 1, 256, False, None),
    (2, 2, 2, 64, 64, 64, False, "keys"),
    (2, 2, 2, 50, 70, 16, False, "added"),
    (2, 2, 2, 50, 70, 16, False, "seen"),
    (2, 1, 1, 63, 63, 80, False, "rows"),
]


def operands(shape, seed=0, spread=1.0):
    batch, heads, key_heads, queries, keys, channels, causal, kind = shape
    torch.manual_seed(seed)
    made = []
    for count, positions in ((heads, queries), (key_heads, keys), (key_heads, keys)):
        x = torch.randn(batch, positions, count, channels).mul(spread).to(torch.bfloat16)
        made.append(x.transpose(1, 2))  # as models make them: a position's heads side by side
    mask = None
    if kind == "keys":  # a padded batch
        mask = torch.zeros(batch, 1, 1, keys)
        mask[0, ..., keys // 2 :] = -math.inf
    elif kind == "added":
        mask = torch.randn(batch, heads, queries, keys)
    elif kind == "seen":
        mask = torch.rand(1, heads, queries, keys) > 0.5
        mask[..., 0] = True
    elif kind == "rows":
        mask = torch.randn(queries, keys)
    grad = torch.randn(batch, queries, heads, channels).to(torch.bfloat16).transpose(1, 2)
    return made, mask, causal, grad


def defined(q, k, v, mask, causal, kept=None):
    """softmax(q k^T / sqrt(D) + mask) v, in the operands' own format."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        seen = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if seen else scores + mask
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    weights = scores.softmax(-1)
    return (weights if kept is None else weights * kept) @ v


def gradients(function, given, grad):
    leaves = [x.detach().requires_grad_() for x in given]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def error(found, true):
    return float((found.double() - true).norm() / true.norm())


def test_output_and_gradients_are_those_of_the_definition():
    every(((shape,) for shape in SHAPES), defines)


def defines(shape):
    given, mask, causal, grad = operands(shape)
    assert fits(*given, mask, True)
    true = gradients(
        lambda q, k, v: defined(q, k, v, mask, causal), [x.double() for x in given], grad
    )
    ours = gradients(lambda q, k, v: attention(q, k, v, mask, 0.0, causal, None), given, grad)
    low = None if mask is None or mask.dtype == torch.bool else mask.to(torch.bfloat16)
    low = mask if low is None else low
    torchs = gradients(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, low, is_causal=causal, enable_gqa=True
        ),
        given,
        grad,
    )
    for name, found, theirs, exact in zip("oqkv", ours, torchs, true, strict=True):
        # 2^-9 is the rounding of one bf16 number; a gradient is made of roundings of weights and
        # of scores' gradients besides its own, so torch's own error is the yardstick
        assert error(found, exact) <= max(1.1 * error(theirs, exact), 2**-9), name


def test_a_number_that_is_not_finite_shows_in_its_row():
    (q, k, v), *_ = operands(SHAPES[1])
    q = q.clone()
    for number in (math.nan, math.inf):
        q[0, 1, 70, 3] = number
        out = attention(q, k, v, None, 0.0, True, None)
        wrong = ~out.isfinite().all(-1)
        assert wrong.nonzero().tolist() == [[0, 1, 70]]


def test_a_query_that_sees_no_key_gives_zeros_as_torch_does():
    (q, k, v), *_, grad = operands(SHAPES[6])
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[7] = False
    q = q[:, :1]
    ours = gradients(lambda *x: attention(*x, mask, 0.0, False, None), (q, k, v), grad[:, :1])
    theirs = F.scaled_dot_product_attention(q, k, v, mask)
    assert ours[0][:, :, 7].eq(0).all()
    assert theirs[:, :, 7].eq(0).all()
    assert all(x.isfinite().all() for x in ours)
    assert ours[1][:, :, 7].eq(0).all()


def test_dropout_keeps_what_it_says_and_the_backward_draws_the_same():
    shape = (1, 2, 2, 96, 96, 32, False, None)
    given, _, _, grad = operands(shape)
    torch.manual_seed(3)
    ours = gradients(lambda *x: attention(*x, None, 0.25, False, None), given, grad)
    # what was kept, seen by one-hot values: the output is then a row of kept weights
    q, k, _ = given
    kept = torch.empty(1, 2, 96, 96)
    for start in range(0, 96, 32):
        hot = torch.zeros(1, 2, 96, 32, dtype=torch.bfloat16)
        hot[:, :, range(start, start + 32), range(32)] = 1
        torch.manual_seed(3)
        kept[..., start : start + 32] = attention(q, k, hot, None, 0.25, False, None) != 0
    assert abs(kept.mean() - 0.75) < 5 * math.sqrt(0.75 * 0.25 / kept.numel())  # 5 sigma
    assert abs((kept[:, 0] == kept[:, 1]).float().mean() - 0.625) < 0.05  # 0.75^2 + 0.25^2
    true = gradients(
        lambda *x: defined(*x, None, False, kept.double() / 0.75), [x.double() for x in given], grad
    )
    for name, found, exact in zip("oqkv", ours, true, strict=True):
        assert error(found, exact) < 2**-7, name  # 4 roundings of bf16


def test_dropout_draws_anew_each_time_and_alike_in_a_recomputation():
    given, *_ = operands(SHAPES[1])
    leaves = [x.requires_grad_() for x in given]

    def drop(*x):
        return attention(*x, None, 0.5, True, None)

    assert not torch.equal(drop(*leaves), drop(*leaves))
    torch.manual_seed(1)
    plain = torch.autograd.grad(drop(*leaves).float().sum(), leaves)
    torch.manual_seed(1)
    again = torch.autograd.grad(
        checkpoint(drop, *leaves, use_reentrant=False).float().sum(), leaves
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_bits_do_not_depend_on_threads():
    given, mask, causal, grad = operands(SHAPES[0])
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(gradients(lambda *x: attention(*x, mask, 0.0, causal, None), given, grad))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_operands_in_any_memory_layout():
    given, mask, causal, grad = operands(SHAPES[4])
    plain = gradients(lambda *x: attention(*x, mask, 0.0, causal, None), given, grad)
    odd = [F.pad(x, (1, 0))[..., 1:] for x in given]  # rows that begin at odd numbers
    columns = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in given]
    for laid in (odd, columns, [x.contiguous() for x in given]):
        other = gradients(lambda *x: attention(*x, mask, 0.0, causal, None), laid, grad)
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    one = torch.ones((), dtype=torch.bfloat16).expand_as(grad)  # of a sum
    assert all(
        x.isfinite().all()
        for x in gradients(lambda *x: attention(*x, mask, 0.0, causal, None), given, one)
    )


def test_a_second_derivative_is_torchs():
    shape = (1, 2, 2, 9, 9, 16, True, None)
    given, *_ = operands(shape)
    leaves = [x.requires_grad_() for x in given]

    def penalty(function):
        out = function(*leaves)
        (grad,) = torch.autograd.grad(out.float().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(grad.float().square().sum(), leaves[1])[0]

    ours = penalty(lambda *x: attention(*x, None, 0.0, True, None))
    true = [x.detach().double().requires_grad_() for x in leaves]
    (grad,) = torch.autograd.grad(defined(*true, None, True).sum(), true[0], create_graph=True)
    exact = torch.autograd.grad(grad.square().sum(), true[1])[0]
    assert error(ours, exact) < 0.1  # torch's bf16 operations one by one, twice over


def test_what_the_kernel_does_not_know():
    for query, key, why in (
        ((1, 2, 4, 20), (1, 2, 4, 20), "channels"),
        ((1, 2, 4, 272), (1, 2, 4, 272), "channels"),
        ((2, 4, 32), (2, 4, 32), "dimensions"),
        ((1, 3, 4, 32), (1, 2, 4, 32), "groups"),
        ((1, 2, 0, 32), (1, 2, 4, 32), "no query"),
        ((1, 2, 4, 32), (1, 2, 0, 32), "no key"),
    ):
        assert not fits(torch.zeros(query), torch.zeros(key), torch.zeros(key), None, True), why
    q, k = torch.zeros(1, 2, 4, 32), torch.zeros(1, 1, 4, 32)
    assert not fits(q, k, k, None, False)  # groups that were not asked for
    assert fits(q, k, k, None, True)
    assert not fits(q, k, k, torch.zeros(4, 4, requires_grad=True), True)
    assert not fits(q, k, k, torch.zeros(4, 3), True)
