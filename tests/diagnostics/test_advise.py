"""``halfstep.advise``: sensitivities against whole passes, the knapsack against all policies."""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.diagnostics.advise.choice import Option, cheapest
from halfstep.diagnostics.advise.layers import gradient_under, policy_of, take_step
from halfstep.diagnostics.advise.proof import Gap, Trials
from halfstep.diagnostics.advise.sensitivity import _bias_and_variance, sensitivities
from halfstep.errors import PrecisionError
from halfstep.precision.policy.recipe import PRODUCTS
from halfstep.precision.policy.rules import place
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.models.gpt.gpt import GPT
from halfstep.trainer.models.shapes import GPTConfig

WIDTH = 64


class Residual(nn.Module):
    """A block whose linear layer sees some channels of its input ``scale`` times as large.

    The weights are as much smaller, so that the function is that of a block without scales.
    """

    def __init__(self, scale):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", scale)
        self.lin = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.lin.weight.div_(scale)

    def forward(self, x):
        return x + F.gelu(self.lin(self.norm(x) * self.scale))


def planted(seed, blocks=8, count=3, strength=300.0):
    """A model, and the names of the layers with an outlier in each block of 16 channels."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    where = sorted(torch.randperm(blocks, generator=generator)[:count].tolist())
    scales = [torch.ones(WIDTH) for _ in range(blocks)]
    for at in where:
        outliers = torch.arange(0, WIDTH, 16) + torch.randint(0, 16, (4,), generator=generator)
        scales[at][outliers] = strength
    return nn.Sequential(*map(Residual, scales), nn.LayerNorm(WIDTH)), {f"{i}.lin" for i in where}


def data(seed, count=4):
    generator = torch.Generator().manual_seed(1000 + seed)
    mixed = torch.randn(WIDTH, WIDTH, generator=generator) / 8
    xs = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(count)]
    return [(x, torch.tanh(x @ mixed)) for x in xs]


def loss_fn(model, batch):
    return (model(batch[0]).float() - batch[1]).square().mean()


def plain(layers=4):
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*parts)


def ranks(values):
    return np.argsort(np.argsort(values))


def correlation(a, b):
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def test_products_alone_rank_as_whole_passes_do():
    """Squared errors of one pass a product, with 24 of them, in an order that the estimate has."""
    model, _ = planted(0)
    batch = data(0)[:1]
    formats = ("bf16", "nvfp4")
    found = [s for s in sensitivities(model, batch, loss_fn, formats) if s.format == "nvfp4"]
    true = sensitivities(model, batch, loss_fn, formats, by_passes=True)
    true = [s for s in true if s.format == "nvfp4"]
    assert [(s.layer, s.product) for s in found] == [(s.layer, s.product) for s in true]
    assert len(found) == 24
    assert correlation([s.error for s in found], [s.error for s in true]) > 0.9
    for a, b in zip(found, true, strict=True):
        if a.product == "wgrad":  # the product's error is the gradient's, but for other draws
            assert a.bias + a.variance == pytest.approx(b.bias + b.variance, rel=0.3), a.layer


def test_bias_and_variance_are_those_of_known_draws():
    generator = torch.Generator().manual_seed(0)
    draws = [[0.5 + 0.1 * torch.randn(10000, generator=generator)] for _ in range(4)]
    bias, variance = _bias_and_variance(draws, 10000.0)
    assert bias == pytest.approx(0.25, rel=0.01)
    assert variance == pytest.approx(0.01, rel=0.05)
    assert _bias_and_variance([[torch.tensor([math.inf])]], 1.0) == (math.inf, 0.0)


def test_the_knapsack_is_that_of_an_exhaustive_search():
    """30 instances of 8 modules, 256 policies each: the cost is the least there is."""
    generator = random.Random(0)
    for _ in range(30):
        items = [
            [Option("bf16", flops := generator.random(), 0.0),
             Option("nvfp4", flops / 4, generator.random() ** 4)]
            for _ in range(8)
        ]  # fmt: skip
        limit = generator.random()
        fitting = [p for p in itertools.product(*items) if sum(o.error for o in p) <= limit]
        best = min(sum(o.time for o in p) for p in fitting)
        assert sum(o.time for o in cheapest(items, limit)) == pytest.approx(best, rel=1e-12)


def test_the_knapsack_has_bounds_where_there_are_very_many_choices():
    generator = random.Random(1)
    items = [
        [Option("a", t := generator.random(), 0.0), Option("b", t / 2, generator.random()),
         Option("c", t / 4, 3 * generator.random())]
        for _ in range(60)
    ]  # fmt: skip
    found = cheapest(items, 10.0)
    assert sum(o.error for o in found) <= 10.0
    # the relaxation, by time saved per error, is a lower bound of the cost
    least = sum(option[0].time for option in items)
    steps = []
    for a, b, c in items:
        one, two = (a.time - b.time) / b.error, (b.time - c.time) / max(c.error - b.error, 1e-9)
        if two <= one and c.error > b.error:
            steps += [(one, b.error), (two, c.error - b.error)]
        else:
            steps += [((a.time - c.time) / c.error, c.error)]
    left = 10.0
    for gain, error in sorted(steps, reverse=True):
        least -= gain * min(error, left)
        left -= min(error, left)
    assert sum(o.time for o in found) <= 1.05 * least
    assert cheapest([[Option("b", 1.0, 2.0)]], 1.0) is None


@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 22))]
)
def test_three_planted_layers_are_named_and_no_other(seed, tmp_path):
    model, sensitive = planted(seed)
    found = halfstep.advise(model, data(seed), loss_fn, steps=0, max_error=0.05)
    assert found.base == "nvfp4"
    assert set(found.exceptions) == sensitive
    file = tmp_path / "policy.toml"
    found.write(file)
    text = file.read_text()
    assert text.count("# fprop: gradient error") == 3
    # the file says what the advice does
    policy = parse_policy(str(file))
    low = {p.name: str(p.recipe) for p in place(policy, model).low}
    assert {name for name, recipe in low.items() if recipe != "nvfp4"} == sensitive
    assert low == {p.name: str(p.recipe) for p in place(parse_policy(found.policy), model).low}


def test_measured_rates_decide_what_is_worth_choosing():
    rates = {"bf16": 700, "mxfp8": 1000, "nvfp4": 900}
    found = halfstep.advise(plain(), data(0), loss_fn, steps=0, rates=rates)
    assert set(found.formats.values()) == {"mxfp8"}
    assert found.saved == pytest.approx(0.3)
    assert "30% less time in linear layers by the given rates" in found.verdict


def test_a_policy_is_proved_over_the_noise_floor():
    model, batches = plain(), data(0)
    found = halfstep.advise(model, batches, loss_fn, tolerance=0.5, steps=8)
    assert found.proved
    assert found.verdict.startswith("proved: 75% less time")
    assert found.floor < 0.5
    assert found.gap.mean <= found.gap.bound <= 0.5
    assert found.exceptions == {}
    parse_policy(found.policy)


def test_no_gap_is_seen_where_there_is_none_and_a_large_one_is():
    model, batches = plain(), data(0)
    trials = Trials(model, batches, loss_fn, _sgd, "bf16-mixed", 8, (0, 1, 2))
    assert trials.gap("bf16-mixed").mean == 0.0
    assert trials.gap("bf16-mixed").bound == trials.floor() > 0.0
    model, _ = planted(2)
    trials = Trials(model, data(2), loss_fn, torch.optim.AdamW, "bf16-mixed", 8, (0, 1, 2))
    low = "bf16-mixed,recipe=nvfp4,simulate=yes"
    gap = trials.gap(low)
    assert gap.bound > gap.mean > 3 * trials.floor()
    assert trials.gap(low, limit=0.01) == Gap(trials.gap_on(0, low), math.inf)


def test_seeds_draw_other_orders_and_other_random_bits():
    model, batches = plain(), data(0)[:1]  # one batch: the order is the same for all
    trials = Trials(model, batches, loss_fn, _sgd, "bf16-mixed", 4, (0, 1))
    low = "bf16-mixed,recipe=nvfp4,simulate=yes"
    assert trials._loss("bf16-mixed", 0) == trials._loss("bf16-mixed", 1)
    assert trials._loss(low, 0) == trials._loss(low, 0) != trials._loss(low, 1)
    trials = Trials(model, data(0), loss_fn, _sgd, "bf16-mixed", 4, (0, 1))
    assert trials._loss("bf16-mixed", 0) != trials._loss("bf16-mixed", 1)


def test_a_run_that_breaks_has_an_infinite_gap():
    trials = Trials(plain(), data(0), loss_fn, lambda ps: torch.optim.SGD(ps, lr=1e30),
                    "bf16-mixed", 8, (0, 1))  # fmt: skip
    assert trials._loss("bf16-mixed", 0) == math.inf
    with pytest.raises(PrecisionError, match="with a lower learning rate"):
        trials.floor()


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def test_a_tolerance_under_the_floor_is_refused():
    with pytest.raises(PrecisionError, match=r"lies under the noise floor of 3 seeds of 8 steps"):
        halfstep.advise(plain(), data(0), loss_fn, tolerance=1e-9, steps=8)


def test_a_budget_that_ends_says_unproved():
    found = halfstep.advise(plain(), data(0), loss_fn, tolerance=0.5, steps=8, seconds=0.0)
    assert not found.proved
    assert found.gap is None
    assert "unproved" in found.verdict
    assert "the time ended" in found.verdict


def test_layers_that_overflow_in_fp16_keep_fp32(tmp_path):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    with torch.no_grad():
        model[1].weight.mul_(1e6)
        model[2].weight.mul_(1e-6)
    batches = data(0)
    found = halfstep.advise(model, batches, loss_fn, ("fp32", "fp16"), steps=0, rates="h100")
    kept = {layer for (layer, _), form in found.formats.items() if form == "fp32"}
    assert "1" in kept  # its outputs are beyond 65,504
    assert "2" in kept  # its inputs are
    assert "0" not in kept
    assert "of its results overflow" in found.evidence("1")
    file = tmp_path / "policy.toml"
    found.write(file)
    assert parse_policy(str(file)) == parse_policy(found.policy)
    kept |= {"0", "3"}  # more layers in fp32 than in fp16 are still exceptions from fp16
    formats = {key: "fp32" if key[0] in kept - {"0"} else "fp16" for key in found.formats}
    found = dataclasses.replace(found, formats=formats, policy=policy_of(formats, "fp32"))
    assert set(found.exceptions) == {"1", "2", "3"}
    found.write(file)
    assert parse_policy(str(file)) == parse_policy(found.policy)


def test_seeds_share_no_random_numbers():
    """A seed's draws are not another's some steps later."""
    seen = []

    def told(model, batch):
        seen.append(torch.rand(()).item())
        return loss_fn(model, batch)

    trials = Trials(plain(), data(0), told, _sgd, "bf16-mixed", 8, (0, 1, 2))
    for seed in trials.seeds:
        trials.gap_on(seed, "bf16-mixed")  # two runs, the policy and its reference, with one seed
    assert len(seen) == 2 * len(set(seen)) == 2 * 3 * 8


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"formats": ("bf16", "nvpf4")}, "allowed: bf16 and then fp8, "),
        ({"formats": ("bf16", "fp16")}, "or fp32 and then fp16"),
        ({"tolerance": 0.0}, "above 0, such as 0.003"),
        ({"tolerance": "0.3"}, r"tolerance='0\.3'; allowed: a number above 0"),
        ({"seeds": (0,)}, "2 different seeds"),
        ({"seeds": (1, 1, 1)}, "2 different seeds"),
        ({"rates": "b100"}, "allowed: h100, h200, b200"),
        ({"rates": "h100"}, "formats mxfp8, nvfp4 have no rate: h100 does not multiply them"),
        ({"rates": {"bf16": 1, "mxfp8": 2}}, "formats nvfp4 have no rate: none is given"),
        ({"rates": {"bf16": 1, "mxfp8": 0, "nvfp4": 2}}, "rate 0 of mxfp8; allowed: a number abo"),
        ({"batches": iter(())}, "every run takes them again, so give a list"),
        ({"batches": []}, "^batches is empty"),
        ({"loss_fn": lambda model, batch: loss_fn(model, batch) * math.nan}, "the loss is nan"),
        (
            {"loss_fn": lambda model, batch: loss_fn(model, batch) - 9, "steps": 4},
            "stays above 0",
        ),
        ({"model": nn.Sequential(nn.Conv1d(4, 4, 1))}, "has none that is a torch.nn.Linear"),
        ({"loss_fn": lambda model, batch: loss_fn(model, batch) * 0}, "is 0 for every weight"),
    ],
)
def test_what_makes_no_sense_is_refused(given, words):
    with pytest.raises(PrecisionError, match=words):
        halfstep.advise(
            **{"model": plain(), "batches": data(0), "loss_fn": loss_fn, "steps": 0, **given}
        )


def test_a_loss_that_is_no_function_is_refused():
    calls = itertools.count()
    with pytest.raises(PrecisionError, match=r"loss_fn returned .* for the same batch"):
        halfstep.advise(
            plain(), data(0), lambda m, b: loss_fn(m, b) * (1 + 0.1 * next(calls)), steps=0
        )


def test_layers_that_a_kernel_fuses_are_no_reason_to_refuse():
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=128, block_size=64, vocab_size=64), seed=0)
    rows = torch.randint(64, (4, 65), generator=torch.Generator().manual_seed(0))

    def of_tokens(model, rows):
        total, count = model.loss_sum((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
        return total / count

    found = take_step(model, rows, of_tokens, "bf16")
    assert [layer.name for layer in found.layers][:2] == ["layers.0.attn.qkv", "layers.0.attn.proj"]


def test_layers_whose_features_fill_no_blocks_stay_as_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, WIDTH))
    found = halfstep.advise(model, data(0), loss_fn, steps=0)
    # 40 outputs are no whole blocks of 32 for dgrad, and the square blocks of nvfp4's weights
    # do not fit either way
    chosen = [found.formats["0", product] for product in ("fprop", "dgrad", "wgrad")]
    assert chosen == ["mxfp8", "bf16", "nvfp4"]
    assert "its features fill no whole blocks of mxfp8" in found.toml()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    halfstep.Precision(found.policy, model, optimizer).close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_the_choice_is_the_best_of_256_policies_by_their_true_errors(seed):
    """Each of 8 layers in bf16 or nvfp4; the error of each policy is that of a whole pass."""
    model, _ = planted(seed)
    batch = data(seed)[:1]
    low = "nvfp4-nearest"
    found = sensitivities(model, batch, loss_fn, ("bf16", low))
    layers = list(dict.fromkeys(s.layer for s in found))
    errors = {x: sum(s.error for s in found if (s.layer, s.format) == (x, low)) for x in layers}
    limit = 0.05
    items = [[Option("bf16", 1.0, 0.0), Option(low, 0.25, errors[layer])] for layer in layers]
    chosen = sum(option.time for option in cheapest(items, limit))
    (reference,) = gradient_under("bf16-mixed", model, batch[0], loss_fn)
    whole = sum(g.square().sum() for g in reference.values())
    best = math.inf
    for forms in itertools.product(("bf16", low), repeat=8):
        pairs = zip(layers, forms, strict=True)
        formats = {(layer, p): form for layer, form in pairs for p in PRODUCTS}
        (grad,) = gradient_under(policy_of(formats, "bf16"), model, batch[0], loss_fn)
        error = sum((grad[n] - g).square().sum() for n, g in reference.items()) / whole
        if error <= limit:
            best = min(best, sum(1.0 if form == "bf16" else 0.25 for form in forms))
    assert best <= chosen <= 1.05 * best
