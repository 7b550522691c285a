"""Rules: which module is in which format, that it computes so, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from every import every
from halfstep import Precision, PrecisionError, parse_policy
from halfstep.optim.optimizers import AdamW
from halfstep.precision.policy.rules import place
from reference.training import batches, differences, loss_of, scaled

F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
LOW = ("bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-pure", "fp16-pure")
OWN = ("bf16-split", "bf16-split24", "bf16-kahan", "bf16-sr")
STORED_LOW = ("bf16-master", "fp16-master", "bf16-pure", "fp16-pure", *OWN)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, count: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def low_dtype(name: str) -> torch.dtype:
    return B16 if name.startswith("bf16") else F16


def optimizer_for(name, model, lr=0.02):
    make = AdamW if name in OWN else torch.optim.AdamW
    return make(model.parameters(), lr=lr, eps=1e-3)


def with_rules(name: str, *rules: tuple[str, str]):
    return replace(parse_policy(scaled(name)), rules=rules)


def prepared(name, model, *rules):
    precision = Precision(with_rules(name, *rules), model, optimizer_for(name, model))
    return precision, model


def fp32_names(policy, model) -> set[str]:
    return {placement.name for placement in place(policy, model).modules if placement.fp32}


# --- which module is in which format -------------------------------------------------------------


def test_placement():
    def check(rules, expected):
        found = fp32_names(with_rules("bf16-master", *rules), Net())
        assert found == set(expected.split(" ")) if expected else found == set()

    every(
        [
            ([], ""),
            ([("head", "fp32")], "head"),
            ([("*norm*", "fp32")], "blocks.0.norm blocks.1.norm"),
            ([("type:LayerNorm", "fp32")], "blocks.0.norm blocks.1.norm"),
            ([("type:Layer*", "fp32")], "blocks.0.norm blocks.1.norm"),
            ([("blocks.?.norm", "fp32")], "blocks.0.norm blocks.1.norm"),
            ([("blocks.[!0].norm", "fp32")], "blocks.1.norm"),
            # a rule on a module holds for everything below
            (
                [("blocks.0", "fp32")],
                "blocks.0 blocks.0.norm blocks.0.mlp blocks.0.mlp.0 blocks.0.mlp.1 blocks.0.mlp.2",
            ),
            # ... and "blocks.0.*" does not hold for the block itself
            (
                [("blocks.0.*", "fp32")],
                "blocks.0.norm blocks.0.mlp blocks.0.mlp.0 blocks.0.mlp.1 blocks.0.mlp.2",
            ),
            # deeper down wins, in whatever order
            ([("blocks.0", "fp32"), ("blocks.0.mlp", "bf16")], "blocks.0 blocks.0.norm"),
            ([("blocks.0.mlp", "bf16"), ("blocks.0", "fp32")], "blocks.0 blocks.0.norm"),
            # for the same module the later one wins
            ([("blocks.?.norm", "fp32"), ("blocks.0.norm", "bf16")], "blocks.1.norm"),
            ([("blocks.0.norm", "bf16"), ("blocks.?.norm", "fp32")], "blocks.0.norm blocks.1.norm"),
            ([("type:LayerNorm", "fp32"), ("blocks.1*", "bf16")], "blocks.0.norm"),
            ([("*", "fp32"), ("blocks*", "bf16")], " stem head"),
        ],
        check,
    )


@pytest.mark.parametrize("name", STORED_LOW)
def test_parameters_of_fp32_modules_are_fp32_and_all_others_are_not(name):
    precision, model = prepared(name, Net(), ("blocks.0", "fp32"), ("head", "fp32"))
    for parameter, tensor in model.named_parameters():
        kept = parameter.startswith(("blocks.0.", "head."))
        assert tensor.dtype == (F32 if kept else low_dtype(name)), parameter
    assert place(precision.policy, model).dtypes() == {
        n: p.dtype for n, p in model.named_parameters()
    }


# --- spelling ------------------------------------------------------------------------------------


globs = st.text(alphabet="abz_.019*?[]!-é", min_size=1, max_size=12)
patterns = st.one_of(globs, globs.map("type:{}".format))


@settings(max_examples=200)
@given(st.sampled_from([*LOW, *OWN]), st.lists(st.tuples(patterns, st.booleans()), max_size=4))
def test_a_policy_with_rules_reads_back_as_itself(name, rules):
    policy = with_rules(name, *((p, "fp32" if high else name[:4]) for p, high in rules))
    assert parse_policy(str(policy)) == policy
    moments = replace(policy, moments="8bit")
    assert parse_policy(str(moments)) == moments


# --- what is refused before step 0 ---------------------------------------------------------------


def refused(name, model, message, *rules):
    before = [(n, p, p.dtype, p.detach().clone()) for n, p in model.named_parameters()]
    optimizer = optimizer_for(name, model)
    with pytest.raises(PrecisionError, match=message):
        Precision(with_rules(name, *rules), model, optimizer)
    for parameter, (_, same, dtype, values) in zip(model.parameters(), before, strict=True):
        assert parameter is same
        assert parameter.dtype == dtype
        assert torch.equal(parameter, values)
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_pre_hooks


def test_a_rule_that_matches_nothing():
    for name in ("fp32", "bf16-mixed", "bf16-master"):
        message = "'haed' -> fp32 matches no module of the model: .*head"
        refused(name, Net(), message, ("haed", "fp32"))
        message = "'type:LayerNrom' -> fp32 matches no class of the model: there are LayerNorm"
        refused(name, Net(), message, ("type:LayerNrom", "fp32"))
    refused("bf16-mixed", nn.Linear(2, 2), "the model has no submodules", ("x", "fp32"))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(5, 4)
        self.lm_head = nn.Linear(4, 5, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        return self.lm_head(self.wte(ids))


def test_tied_weights_of_which_one_owner_is_fp32():
    message = "wte.weight and lm_head.weight are one tensor"
    for name in ("bf16-master", "bf16-split"):
        refused(name, Tied(), message, ("lm_head", "fp32"))
        refused(name, Tied(), message, ("wte", "fp32"))
    _, model = prepared("bf16-master", Tied(), ("wte", "fp32"), ("lm_head", "fp32"))
    assert model.wte.weight is model.lm_head.weight
    assert model.wte.weight.dtype == F32
    # fp32 weights are one tensor for both under mixed: the rule can be honoured
    precision, model = prepared("bf16-mixed", Tied(), ("lm_head", "fp32"))
    with precision.autocast():
        logits = model(torch.tensor([1, 2]))
    assert torch.equal(logits, model.wte.weight[[1, 2]] @ model.wte.weight.T)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.b = nn.Sequential(self.a[0], self.a[1])

    def forward(self, x):
        return self.b(self.a(x))


def test_a_shared_module_that_rules_place_in_two_formats():
    message = "both a.0 and b.0 is in fp32 under the one name and in bf16 under the other"
    refused("bf16-mixed", Twice(), message, ("a.0", "fp32"))
    refused("bf16-mixed", Twice(), message, ("a", "fp32"))
    message = "both a.0 and b.0 is called in fp32 under the one name and in bf16"
    refused("bf16-mixed", Twice(), message, ("a", "fp32"), ("?.0", "fp32"))
    prepared("bf16-mixed", Twice(), ("type:Linear", "fp32"))


def test_attention_is_one_piece():
    attention = nn.MultiheadAttention(4, 2)
    message = "separates out_proj from the model, a MultiheadAttention"
    refused("bf16-master", attention, message, ("out_proj", "fp32"))
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    message = "separates 0.out_proj from 0, a MultiheadAttention.*write a rule for 0 as a whole"
    refused("bf16-mixed", model, message, ("0", "fp32"), ("*.out_proj", "bf16"))
    prepared("bf16-master", model, ("0", "fp32"))


# --- what runs -----------------------------------------------------------------------------------


class Spy(nn.Module):
    """Records what arrives and what it gives, and nothing else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list = []

    def forward(self, *args, **kwargs):
        output = self.inner(*args, **kwargs)
        self.seen.append((args, kwargs, output, torch.is_autocast_enabled("cpu")))
        return output


@pytest.mark.parametrize("name", [*LOW, *OWN])
@pytest.mark.parametrize("inner", [nn.LayerNorm(8), nn.Linear(8, 8), Block()], ids=str)
def test_an_fp32_module_gives_the_fp32_module_s_bits_on_the_cast_input(name, inner):
    inner = copy.deepcopy(inner)
    witness = copy.deepcopy(inner)
    model = nn.Sequential(nn.Linear(4, 8), Spy(inner), nn.Linear(8, 2))
    precision, model = prepared(name, model, ("1", "fp32"))
    outside = []
    model[1].register_forward_hook(lambda m, args, output: outside.append((args[0], output)))
    with precision.autocast():
        model(torch.randn(3, 4))
    (arrived, given), (args, _, output, autocast_on) = outside[0], model[1].seen[0]
    low = low_dtype(name)
    assert arrived.dtype == low
    assert torch.equal(args[0], arrived.float())
    assert args[0].dtype == output.dtype == F32
    assert not autocast_on
    assert torch.equal(output, witness(arrived.float()))
    # 16-bit neighbours get 16 bits; autocast casts for itself
    assert given.dtype == (F32 if name.endswith("mixed") else low)
    assert torch.equal(given, output.to(given.dtype))


@pytest.mark.parametrize("name", [*LOW, *OWN])
def test_star_to_fp32_is_fp32_bit_for_bit(name):
    losses, weights = [], []
    # bf16-kahan and bf16-sr keep moments in bf16 if they are not told otherwise
    ours = replace(with_rules(name, ("*", "fp32")), **({"moments": "fp32"} if name in OWN else {}))
    for policy in (parse_policy("fp32"), ours):
        model = Net()
        precision = Precision(policy, model, optimizer_for(name, model))
        losses.append([])
        for batch in batches(5):
            losses[-1].append(precision.step(loss_of(model, precision, batch), max_norm=1.0).loss)
        weights.append(model.state_dict())
    assert losses[0] == losses[1]
    assert not differences(*weights)


def test_the_root_in_fp32_sees_its_inputs_unrounded_and_may_hold_16_bit_modules():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(4, 4)

        def forward(self, x):
            self.seen = x
            y = self.low(x)
            self.given = y
            return y + x

    x = torch.full((1, 4), 1.001)
    for name in ("bf16-master", "bf16-mixed", "fp16-mixed"):
        precision, model = prepared(name, Root(), ("*", "fp32"), ("low", name[:4]))
        witness = copy.deepcopy(model.low.weight.detach()), model.low.bias.detach()
        with precision.autocast():
            output = model(x)
        assert torch.equal(model.seen, x)
        low = low_dtype(name)
        # the fp32 sum of exact products, rounded once to 16 bits
        product = torch.nn.functional.linear(x.to(low).float(), witness[0].to(low).float())
        expected = (product + witness[1].to(low).float()).to(low).float()
        # one rounding of the product more or less: an ulp below 2 is 2^-7 (bf16), 2^-10 (fp16)
        assert (model.given - expected).abs().max() <= torch.finfo(low).eps
        assert model.given.dtype == output.dtype == F32
        assert torch.equal(model.given, model.given.to(low).float())


# --- the wrapped forward -------------------------------------------------------------------------


class Noted(nn.LayerNorm):
    def forward(self, x):
        self.seen = x.dtype
        return super().forward(x)


def test_torch_s_fused_inference_path_does_not_bypass_a_rule():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.norm1 = Noted(8)
    model = nn.Sequential(nn.Linear(4, 8), layer).eval()
    with torch.inference_mode():
        model(torch.ones(2, 3, 4))
    assert not hasattr(layer.norm1, "seen")  # torch calls one fused kernel for the whole layer
    precision, model = prepared("bf16-master", model, ("*.norm?", "fp32"))
    with precision.autocast(), torch.inference_mode():
        assert model(torch.ones(2, 3, 4)).isfinite().all()
    assert layer.norm1.seen == F32
