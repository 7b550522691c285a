"""What really ran: formats of operations and storage, against a policy and a golden file."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfstep.precision.casting.autocast
from diagnostics.planted import MAKERS, batch_for, loss_of
from halfstep import Precision, PrecisionError, trace
from halfstep.diagnostics.trace import Operation
from halfstep.optim import AdamW


def traced(name, spec, plant=lambda model: None):
    torch.manual_seed(0)
    model, batch = MAKERS[name](), batch_for(name)
    plant(model)
    return step_of(spec, model, lambda: loss_of(name, model, batch))


def step_of(spec, model, loss, plant=lambda model: None):
    optimizer = AdamW(model.parameters(), lr=1e-3)
    precision = Precision(spec, model, optimizer)
    plant(model)
    with trace(model, precision) as ran:
        with precision.autocast():
            value = loss()
        precision.step(value)
    return ran


def rows(ran, op, direction="forward"):
    return [row for row in ran.operations if (row.op, row.direction) == (op, direction)]


@pytest.mark.covering
@pytest.mark.parametrize("name", [*MAKERS])
@pytest.mark.parametrize("spec", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master"])
def test_what_runs_is_what_the_policy_says(name, spec):
    ran = traced(name, spec)
    assert ran.differences() == []
    low = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}[spec.partition("-")[0]]
    products = [row for op in ("mm", "addmm", "bmm") for row in rows(ran, op)]
    assert products
    assert {form for row in products for form in row.inputs} == {low}
    backward = [row for op in ("mm", "bmm") for row in rows(ran, op, "backward")]
    assert {form for row in backward for form in row.inputs} == {low}
    other = "fp16-mixed" if low != "fp16" else "bf16-mixed"
    assert len(ran.differences(other)) >= len(products)


@pytest.mark.parametrize(("spec", "low"), [("bf16-mixed", "bf16"), ("fp16-mixed", "fp16")])
@pytest.mark.parametrize("native", [True, False])
def test_simulated_products_and_compiled_kernels_show_as_what_they_mean(
    spec, low, native, monkeypatch
):
    monkeypatch.setattr(halfstep.precision.casting.autocast, "cpu_has_bf16", lambda: native)
    ran = traced("gpt", spec)
    (attention,) = {(row.inputs, row.outputs) for row in rows(ran, "attention")}
    assert attention == ((low,) * 3, (low,))
    linears = [row for row in rows(ran, "addmm") if row.class_name == "Linear"]
    assert len(linears) == 2 * 4  # two blocks of four layers
    assert {(row.inputs, row.outputs) for row in linears} == {((low,) * 3, (low,))}
    # the only casts of a layer are autocast's own, of weight and bias (its input comes in 16 bits)
    casts = [row for row in rows(ran, "cast") if row.class_name == "Linear"]
    assert {(row.inputs, row.outputs, row.calls) for row in casts} == {(("fp32",), (low,), 2)}
    attends = [row for row in rows(ran, "cast") if row.class_name == "CausalSelfAttention"]
    assert not attends


class Aside(nn.Module):
    """Leaves the policy: its product is in fp32."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.linear(x.float(), self.inner.weight)


def test_an_operation_that_leaves_the_policy_is_named():
    def plant(model):
        model.classifier = Aside(model.classifier)

    ran = traced("bert", "bf16-mixed", plant=plant)
    found = ran.differences()
    assert len(found) == 2  # one product forward, two calls backward
    assert all("of classifier (Aside): 2 fp32 -> fp32" in line for line in found)
    assert all(line.endswith("bf16-mixed says bf16") for line in found)
    ran = traced("bert", "bf16-mixed,keep_fp32=classifier*", plant=plant)
    assert ran.differences() == []


@pytest.mark.parametrize("spec", ["bf16-mixed", "fp16-mixed", "bf16-master"])
def test_a_matmul_of_experts_is_one_in_the_compute_dtype(spec):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 8, 8))

        def forward(self, x):
            offs = torch.tensor([2, len(x)], dtype=torch.int32)
            return nn.functional.grouped_mm(x, self.weight, offs=offs)

    model, x = Experts(), torch.randn(5, 8)
    ran = step_of(spec, model, lambda: model(x).float().square().mean())
    low = spec[:4]
    found = {row.inputs for row in ran.operations if row.op == "grouped_mm"}
    assert found == {(low, low)}
    assert ran.differences() == []


def test_a_trace_changes_no_bit_and_leaves_no_hook(monkeypatch):
    def weights(watched):
        torch.manual_seed(0)
        model, batch = MAKERS["bert"](), batch_for("bert")
        precision = Precision("bf16-mixed", model, torch.optim.AdamW(model.parameters()))
        for step in range(3):
            if watched and step == 1:
                with trace(model, precision), precision.autocast():
                    precision.step(loss_of("bert", model, batch))
            else:
                with precision.autocast():
                    loss = loss_of("bert", model, batch)
                precision.step(loss)
        hooks = [h for p in model.parameters() for h in (p._post_accumulate_grad_hooks or {})]
        assert not hooks
        return [*model.parameters()]

    # without compiled kernels, which step aside for a trace
    monkeypatch.setattr("halfstep.kernels.library.loaded", lambda: "none")
    for a, b in zip(weights(True), weights(False), strict=True):
        assert torch.equal(a, b)


def test_without_a_precision_a_policy_is_needed_to_compare():
    model = nn.Linear(2, 1)
    with trace(model) as ran:
        model(torch.ones(1, 2)).sum().backward()
    assert rows(ran, "addmm")[0].inputs == ("fp32",) * 3
    with pytest.raises(PrecisionError, match="policy is a NoneType"):
        ran.differences()
    assert len(ran.differences("bf16-mixed")) == 2
    with pytest.raises(PrecisionError, match=r"trace\(precision\)"):
        trace(model, "bf16-mixed")


def low_bit_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def traced_below_16_bits(policy, model=None, plant=lambda model: None):
    model = model or low_bit_model()
    x = torch.randn(32, 64)
    return step_of(policy, model, lambda: model(x).square().mean(), plant)


def schemes(ran):
    products = ("fprop", "dgrad", "wgrad")
    found = [row for row in ran.operations if row.op in products]
    assert all(row.calls == 1 and row.outputs == ("bf16",) for row in found)
    assert all((row.direction == "forward") == (row.op == "fprop") for row in found)
    return {(row.module, row.op): row.inputs[0] for row in found}


@pytest.mark.covering
@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("bf16", [True, False])
def test_a_trace_shows_what_each_product_below_16_bits_ran_in(scheme, bf16, monkeypatch):
    monkeypatch.setattr(halfstep.precision.casting.autocast, "cpu_has_bf16", lambda: bf16)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 256), nn.Linear(256, 64))
    policy = f"bf16-mixed,rules=2:{scheme}/bf16/{scheme},simulate=yes"
    ran = traced_below_16_bits(policy, model)
    how = f"{scheme} simulated"
    assert schemes(ran) == {("2", "fprop"): how, ("2", "dgrad"): "bf16", ("2", "wgrad"): how}
    assert ran.differences() == []
    # the layers that have no recipe show their products as ever, and nothing of the rounding shows
    names = {row.op for row in ran.operations if row.module == "2" and row.direction == "backward"}
    assert names <= {"dgrad", "wgrad", "sum", "cast", "t", "detach"}
    assert "addmm" in {row.op for row in ran.operations if row.module == "3"}


def test_a_layer_that_ran_in_bf16_against_its_recipe_is_a_difference():
    policy = "mxfp8,simulate=yes"
    ran = traced_below_16_bits(policy, plant=lambda m: m[2].__dict__.pop("forward"))
    found = ran.differences()
    assert len(found) == 2  # forward, and two products backward
    assert all("of 2 (Linear)" in line and line.endswith("says mxfp8") for line in found)
    ran = traced_below_16_bits(policy)
    assert ran.differences() == []
    (line,) = [x for x in ran.differences("nvfp4,rules=0:mxfp8/mxfp8/nvfp4") if "of 0 " in x]
    assert line.startswith("wgrad in backward of 0 (Linear): 2 mxfp8 simulated -> bf16, 1 call")
    assert line.endswith("says nvfp4")
    assert len(ran.differences("bf16-mixed")) == 5


def test_a_loss_that_is_an_autograd_function_is_forward_and_the_norm_of_gradients_is_the_update():
    hidden, weight = torch.ones(4, 8), nn.Linear(8, 16, bias=False)
    precision = Precision("bf16-mixed", weight, torch.optim.SGD(weight.parameters(), 0.1))
    with trace(weight, precision) as ran:
        with precision.autocast():
            loss = halfstep.linear_cross_entropy(hidden, weight.weight, torch.arange(4))
        precision.step(loss)
    # a GPU adds the head's gradients up in fp32
    addmm = Operation("", "", "forward", "addmm", ("fp32", "bf16", "bf16"), ("fp32",), 1)
    ran.operations = (*ran.operations, addmm)
    assert ran.differences() == []
    assert {row.direction for row in ran.operations if row.op == "log_softmax"} == {"forward"}
    assert {row.direction for row in ran.operations if "norm" in row.op} == {"update"}
