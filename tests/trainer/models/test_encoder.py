"""Encoder: sums over texts, padding, precision policies, and what it promises to distribution."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from halfstep.errors import ConfigError, DataError
from halfstep.optim.optimizers import AdamW
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.step import Precision
from halfstep.trainer.models.encoder.encoder import Encoder, EncoderConfig

CONFIG = EncoderConfig(
    labels=("a", "b", "c"),
    vocab_size=23,
    max_length=12,
    n_layer=2,
    n_head=2,
    n_embd=16,
    ngram_orders=(2, 3),
    ngram_buckets=61,
    dropout=0.3,
    token_dropout=0.2,
)


def batch(b=6, t=12, seed=0, config=CONFIG):
    """Texts of 1 to t tokens, one of them t long."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, t + 1, (b,), generator=g)
    lengths[0] = t
    mask = torch.arange(t) < lengths.unsqueeze(1)
    ids = torch.randint(4, config.vocab_size, (b, t), generator=g) * mask
    labels = torch.randint(0, len(config.labels), (b,), generator=g)
    keys = torch.randint(0, 2**63 - 1, (b,), generator=g)
    return ids, mask, labels, keys


def trained(config=CONFIG, **how):
    """A model none of whose weights are as they were made."""
    model = Encoder(config, seed=1, **how)
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.05)
    return model


def rows(whole, index):
    """Some texts of a batch, padded no longer than they need."""
    ids, mask, labels, keys = (x[index] for x in whole)
    longest = int(mask.sum(1).max())
    return ids[:, :longest], mask[:, :longest], labels, keys


def gradients(model, batches):
    """Loss sum, weights and gradients, each summed over the batches."""
    model.zero_grad()
    sums = [model.loss_sum(part) for part in batches]
    for loss, _ in sums:
        loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    return sum(s.item() for s, _ in sums), sum(w.item() for _, w in sums), found


# --- construction --------------------------------------------------------------------------------


def test_weights_follow_the_seed_and_leave_the_global_state_alone():
    before = torch.random.get_rng_state()
    a, b, c = Encoder(CONFIG, seed=1), Encoder(CONFIG, seed=1), Encoder(CONFIG, seed=2)
    assert torch.equal(before, torch.random.get_rng_state())
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not torch.equal(a.wte.weight, c.wte.weight)


def test_meta_construction_then_materialisation_gives_the_same_weights():
    with torch.device("meta"):
        model = Encoder(CONFIG)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.init_weights_(torch.Generator().manual_seed(5))
    for p, q in zip(model.parameters(), Encoder(CONFIG, seed=5).parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    "wrong",
    [
        {"label_smoothing": 1.0},
        {"label_smoothing": -0.1},
        {"class_weights": [1.0, 2.0]},
        {"class_weights": [1.0, 2.0, 0.0]},
        {"class_weights": [1.0, 2.0, math.nan]},
    ],
)
def test_a_wrong_loss_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"label_smoothing|class_weights"):
        Encoder(CONFIG, **wrong)


# --- the function --------------------------------------------------------------------------------


def test_a_fresh_model_knows_nothing():
    ids, mask, labels, _ = batch(b=32)
    loss, weight = Encoder(CONFIG, seed=1).eval().loss_sum((ids, mask, labels, labels))
    # Logits are near 0: a loss of log 3 within a tenth.
    assert (loss / weight).item() == pytest.approx(math.log(3), abs=0.1)


def test_loss_and_gradients_are_sums_over_texts_with_dropout_on():
    model = trained(label_smoothing=0.1, class_weights=[1.0, 2.0, 0.5]).double()
    whole = batch(b=7)
    loss, weight, found = gradients(model, [whole])
    torch.manual_seed(123)  # is not looked at
    parts = [rows(whole, index) for index in ([3], [0, 6, 2], [5, 1, 4])]
    loss_parts, weight_parts, found_parts = gradients(model, parts)
    # fp64 sums in another order. The loss itself is fp32: some fp32 units of a sum near 10.
    assert loss_parts == pytest.approx(loss, rel=1e-6)
    assert weight_parts == weight
    logits = model(whole[0], whole[1], whole[3])
    for name, gradient in found.items():
        torch.testing.assert_close(found_parts[name], gradient, rtol=0, atol=1e-6, msg=name)
    for index in ([3], [0, 6, 2], [5, 1, 4]):
        ids, mask, _, keys = rows(whole, index)
        torch.testing.assert_close(model(ids, mask, keys), logits[index], rtol=0, atol=1e-12)


def test_gradients_of_logits_are_sums_over_texts_to_the_last_fp64_digits():
    model = trained().double()
    whole = batch(b=7)
    target = torch.randn(7, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def summed(index):
        ids, mask, _, keys = rows(whole, index)
        model.zero_grad()
        (model(ids, mask, keys) * target[index]).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    want = summed(list(range(7)))
    parts = [summed(index) for index in ([3], [0, 6, 2], [5, 1, 4])]
    for name, gradient in want.items():
        total = sum(part[name] for part in parts)
        torch.testing.assert_close(total, gradient, rtol=0, atol=1e-12, msg=name)


def test_without_n_grams_there_is_the_transformer_alone():
    config = dataclasses.replace(CONFIG, ngram_orders=())
    model, full = Encoder(config, seed=1), Encoder(CONFIG, seed=1)
    ids, mask, _, keys = batch()
    assert not any("ngram" in name for name, _ in model.named_parameters())
    # Tables of n-grams begin at 0, and all else is drawn before them.
    assert torch.equal(model(ids, mask, keys), full(ids, mask, keys))


def test_dropout_depends_on_the_key_and_on_training():
    model = trained()
    ids, mask, _, keys = batch()
    assert torch.equal(model(ids, mask, keys), model(ids, mask, keys))
    other = model(ids, mask, keys + 1)
    assert (model(ids, mask, keys) != other).any(dim=1).all()
    none = model(ids, mask, torch.full_like(keys, -1))
    assert torch.equal(model(ids, mask), none)
    model.eval()
    assert torch.equal(model(ids, mask, keys), none)


def test_each_dropout_has_a_mask_of_its_own():
    model = Encoder(CONFIG)
    sites = [m.site for m in model.modules() if hasattr(m, "site")]
    assert len(sites) == 3 + 2 * CONFIG.n_layer + len(CONFIG.ngram_orders)
    assert len(set(sites)) == len(sites)


@pytest.mark.parametrize("training", [False, True])
def test_padding_changes_no_logits(training):
    model = trained().double().train(training)
    ids, mask, _, keys = batch(t=7)
    padded = F.pad(ids, (0, 5), value=9)  # whatever stands in the padding
    logits = model(padded, F.pad(mask, (0, 5)), keys)
    # fp64: products with other shapes are summed in another order.
    torch.testing.assert_close(logits, model(ids, mask, keys), rtol=0, atol=1e-12)


def test_order_and_neighbours_matter():
    model = Encoder(CONFIG, seed=1).eval()
    ids, mask, _, _ = batch(b=1)
    swapped = ids.clone()
    swapped[0, 3], swapped[0, 4] = ids[0, 4], ids[0, 3]
    assert not torch.equal(model(ids, mask), model(swapped, mask))


def test_a_row_without_tokens_gives_finite_numbers():
    model = Encoder(CONFIG, seed=1)
    ids, mask, labels, keys = batch()
    mask[2], labels[2] = False, -1
    loss, weight = model.loss_sum((ids, mask, labels, keys))
    loss.backward()
    assert weight.item() == 5
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_smoothing_is_of_training_and_weights_of_both():
    ids, mask, labels, keys = batch()
    keys = torch.full_like(keys, -1)
    weights = torch.tensor([1.0, 2.0, 0.5])
    model = Encoder(CONFIG, seed=1, label_smoothing=0.2, class_weights=weights.tolist())
    assert set(model.state_dict()) == set(dict(model.named_parameters()))
    for training, smoothing in ((True, 0.2), (False, 0.0)):
        model.train(training)
        logits = model.logits((ids, mask, labels, keys)).double()
        want = F.cross_entropy(
            logits, labels, weights.double(), reduction="sum", label_smoothing=smoothing
        )
        loss, weight = model.loss_sum((ids, mask, labels, keys))
        assert loss.item() == pytest.approx(want.item(), rel=1e-6)  # fp32
        assert weight.item() == weights[labels].sum().item()


def test_too_long_a_text_and_unknown_tokens_are_explained():
    model = Encoder(CONFIG)
    with pytest.raises(DataError, match="13 tokens, but the model has 12 positions"):
        model(torch.zeros(1, 13, dtype=torch.int64), torch.ones(1, 13, dtype=torch.bool))
    for bad in (23, -1):
        with pytest.raises(DataError, match=f"{bad}.* but the model knows 0 to 22"):
            model(torch.tensor([[bad]]), torch.ones(1, 1, dtype=torch.bool))


def test_blocks_are_the_layers_in_order():
    model = Encoder(CONFIG)
    assert [model.get_submodule(f"layers.{i}") for i in range(2)] == model.blocks()


# --- precision -----------------------------------------------------------------------------------

NEITHER_ON_ONE_CPU = {"tf32", "bf16-module"}


# tf32 needs a GPU and bf16-module FSDP2.
@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in NEITHER_ON_ONE_CPU])
def test_every_policy_learns_to_tell_tokens_apart(policy):
    config = dataclasses.replace(CONFIG, dropout=0.1, token_dropout=0.1)
    model = Encoder(config, seed=1)
    kind = torch.optim.AdamW if policy == "fp16-pure" else AdamW  # ours has no fp16 moments
    optimizer = kind(model.parameters(), lr=2e-2, eps=1e-4)
    precision = Precision(policy, model, optimizer)
    ids, mask, _, keys = batch(b=32, t=6, config=config)
    labels = ids[:, 0] % 3  # the first token tells
    losses = []
    for step in range(15):
        with precision.autocast():
            loss, weight = model.loss_sum((ids, mask, labels, keys + step))
        assert loss.dtype == weight.dtype == torch.float32
        result = precision.step(loss / weight, max_norm=1.0)
        losses.append(result.loss)
    assert min(losses[-5:]) < 0.75 * losses[0]
    with precision.autocast():
        assert model.eval().logits((ids, mask, labels, keys)).dtype == torch.float32


SETTINGS = {
    "fp32": (torch.float32, None, 2.0**-24 * 128),
    "bf16 autocast": (torch.float32, torch.bfloat16, 2.0**-8 * 4),
    "bf16": (torch.bfloat16, None, 2.0**-8 * 4),
    "fp16": (torch.float16, None, 2.0**-11 * 4),
}
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NEEDS AN NVIDIA GPU"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_has_its_digits_in_every_gradient(setting, device):
    # Few kinds of tokens and 2,000 of them: a gradient that is summed in 16 bits anywhere shows.
    params, autocast, bound = SETTINGS[setting]
    config = dataclasses.replace(CONFIG, vocab_size=7, max_length=64, ngram_buckets=5)
    start = trained(config).bfloat16().half()  # weights that every dtype holds exactly
    # Rounding moves maxima, and with them whole gradients, between positions that are nearly equal.
    start.head.weight.data[:, config.n_embd :] = 0
    oracle = copy.deepcopy(start).double()
    whole = batch(b=64, t=64, config=config)
    oracle.loss_sum(whole)[0].backward()

    model = copy.deepcopy(start).to(device, params)
    with torch.autocast(device, autocast, enabled=autocast is not None):
        loss, _ = model.loss_sum(tuple(x.to(device) for x in whole))
    loss.backward()
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        error = (p.grad.cpu().double() - q.grad).norm() / q.grad.norm()
        # Some units of the setting's own rounding: of operands, products and activations.
        assert error < bound, (name, error.item())


def test_dropout_is_the_same_on_every_device_and_in_every_precision():
    ids, mask, _, keys = batch(b=64)
    exact = trained()
    low = copy.deepcopy(exact).bfloat16()
    error = (exact(ids, mask, keys) - low(ids, mask, keys)).norm()
    other = (exact(ids, mask, keys) - exact(ids, mask, keys + 1)).norm()
    # bf16 rounds to 8 bits; another mask changes a third of all features.
    assert error < 0.1 * other
