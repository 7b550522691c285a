"""Hugging Face architectures, unchanged, through every policy: twenty steps and all that is kept.

Models and batches are in :mod:`trainer.models.hf_zoo`; the loss is the model's own. A pair of
architecture and policy is trained once and looked at from all sides. The policies are one of each
mechanism (fp32, casts per operation, masters, an optimizer of ours, pure 16 bits): what differs
between the policies of one mechanism is the optimizer's and not the model's. The quick tier takes
the mechanisms in turn, each architecture through one of them; the rest is ``slow``.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import ModelOutput

import halfstep
from halfstep.errors import PrecisionError
from halfstep.optim import AdamW
from halfstep.precision.policy.policy import POLICIES, dtype_name
from trainer.models.hf_zoo import ZOO, Case

# transformers says so of GPT-2's own configuration, and of kernels for GPUs that Mamba does without
pytestmark = [
    pytest.mark.covering,
    pytest.mark.filterwarnings("ignore:.*(loss_type|falling back):UserWarning"),
]

STEPS = 20
F32, B16 = torch.float32, torch.bfloat16
REFUSED = {
    "tf32": r"tf32 cannot be honoured on cpu: a CPU has no tf32 .*; the nearest that can is fp32",
    "bf16-module": r"bf16-module computes in bf16 where FSDP2 gathers weights, and \S+ is not "
    r"sharded by it: .*policy bf16-mixed",
}
LOW = [n for n, p in POLICIES.items() if n not in REFUSED and p.param_dtype != F32]
MECHANISMS = ["fp16-master", "bf16-mixed", "bf16-split", "bf16-pure", "fp32"]
PAIRS = [
    pytest.param(n, p, marks=[pytest.mark.slow] * (p != MECHANISMS[i % 5]), id=f"{n}-{p}")
    for i, n in enumerate(ZOO)
    for p in MECHANISMS
]


@pytest.fixture(autouse=True, scope="module")
def quiet():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@dataclass
class Run:
    """A model after its steps, and what was seen on the way."""

    model: Any
    optimizer: torch.optim.Optimizer
    precision: halfstep.Precision
    buffers: dict[str, torch.Tensor]
    start: dict[str, torch.Tensor]
    meter: halfstep.LostUpdateMeter
    results: list[halfstep.StepResult] = field(default_factory=list)

    @property
    def losses(self):
        return [result.loss for result in self.results]


def spelled(name, policy):
    """The policy, with the rule that an architecture's refusal names where it needs one."""
    keep = ZOO[name].keep if policy in LOW else ""
    return f"{policy},keep_fp32={keep}" if keep else policy


def optimizer_for(model, case, policy):
    value = halfstep.parse_policy(policy)
    kind = partial(AdamW, seed=3) if value.needs_own_optimizer else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=case.lr)
    if value.is_pure:
        for group in optimizer.param_groups:
            group["eps"] = max(group["eps"], torch.finfo(value.master_dtype).tiny)
    return optimizer


def begin(name, policy, **changes):
    case: Case = ZOO[name]
    model = case.make(**changes)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    start = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = optimizer_for(model, case, policy)
    precision = halfstep.Precision(policy, model, optimizer)
    meter = halfstep.LostUpdateMeter(precision, every=10, samples=256)
    return Run(model, optimizer, precision, buffers, start, meter)


def step(run, batch, number):
    torch.manual_seed(number)  # of dropout
    with run.precision.autocast():
        output = run.model(**batch)
    result = run.precision.step(output.loss, max_norm=1.0)
    run.results.append(result)
    return result


@cache
def trained(name, policy):
    run, batch = begin(name, spelled(name, policy)), ZOO[name].batch()
    for number in range(STEPS):
        step(run, batch, number)
    return run


def floats(value):
    """Name and tensor of everything floating in an output, nested ones too."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, torch.Tensor):
            if item.is_floating_point():
                yield key, item
        elif isinstance(item, tuple | list | dict):
            yield from floats(item)


# --- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_the_table_names_every_gradient_that_is_rounding(name):
    model = ZOO[name].make().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batch = {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in ZOO[name].batch().items()
    }
    model(**batch).loss.backward()
    norms = {key: p.grad.norm() for key, p in model.named_parameters() if p.grad is not None}
    whole = torch.stack([*norms.values()]).norm()
    for key, norm in norms.items():
        # fp64 rounds at 1e-16; the smallest of the others, behind ConvNeXt's scales, is 5e-11
        assert (norm < 1e-14 * whole) == ZOO[name].is_noise(key), (key, float(norm / whole))


def the_loss_falls(name, policy):
    run = trained(name, policy)
    applied = [result.applied for result in run.results]
    assert all(math.isfinite(loss) for loss in run.losses)
    # One batch, learnt by heart: fp32 comes below 0.75 of its first loss with every architecture
    # here; what fp16 skips at first, and bf16-pure loses, costs less than another 0.1.
    assert run.losses[-1] < 0.85 * run.losses[0]
    skipped = STEPS - sum(applied)
    assert run.precision.applied_total == sum(applied)
    assert run.precision.skipped_total == skipped
    if run.precision.policy.loss_scale.kind == "none":
        assert skipped == 0
        return
    for result in run.results:
        assert result.applied or result.reason in ("overflow", "nan_gradients")
        assert result.next_loss_scale == result.loss_scale * (1 if result.applied else 0.5)
        assert math.isfinite(result.grad_norm) or not result.applied
    assert run.results[-1].next_loss_scale == 2.0 ** (16 - skipped)
    # a scale of 2^16 is at most 2^6 too large for gradients of losses near 1
    assert skipped <= 6


def the_curve_is_that_of_fp32(name, policy):
    value = halfstep.parse_policy(policy)
    if policy == "fp32" or value.is_pure:  # the reference; and those that say they lose updates
        return
    expected = trained(name, "fp32").losses
    run = trained(name, policy)
    # Each of some 64 operations in a row rounds by up to half an eps, at random: 8 times that. A
    # skipped step puts the curve behind by one, so only curves without are compared.
    bound = 8 * torch.finfo(value.compute_dtype).eps / 2
    assert run.losses[0] == pytest.approx(expected[0], rel=bound)
    if run.precision.skipped_total == 0:
        worst = max(abs(a - b) for a, b in zip(run.losses, expected, strict=True))
        # near 0 a loss is a difference of logits, whose error does not shrink with it
        assert worst < bound * expected[0]


# --- what is stored ------------------------------------------------------------------------------


def parameters_and_masters_are_in_the_policys_formats(name, policy):
    run = trained(name, policy)
    value = run.precision.policy
    norms = {n for n, m in run.model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for key, parameter in run.model.named_parameters():
        kept = key.rpartition(".")[0] in norms
        assert parameter.dtype == (F32 if kept else value.param_dtype), key
        if parameter.requires_grad:
            master = run.precision.named_parameters()[key]
            wanted = value.master_dtype if value.has_masters else value.param_dtype
            assert master.dtype == (F32 if kept else wanted), key
            if value.has_masters and not kept:
                assert torch.equal(master.to(parameter.dtype), parameter)
        else:
            assert key not in run.precision.named_parameters()
            assert torch.equal(parameter, run.start[key].to(parameter.dtype)), key
    named = dict(run.precision.masters.items())
    if value.keeps_more_than_weights:
        assert {master.dtype for master in named.values()} == {F32}
    assert set(named) == {n for n, p in run.model.named_parameters() if p.requires_grad}


def every_trained_weight_moves(name, policy):
    run = trained(name, policy)
    pairs = [
        (key, master, run.start[key].to(master.dtype))
        for key, master in run.precision.masters.items()
    ]
    moved = [key for key, now, before in pairs if not torch.equal(now, before)]
    if not run.precision.policy.is_pure:  # an update at 1.0 is lost there
        idle = {key for key, _, _ in pairs if not ZOO[name].is_noise(key)} - set(moved)
        got = {key for key in idle if run.precision.named_parameters()[key] in run.optimizer.state}
        assert not got
    assert len(moved) > len(pairs) // 2


def buffers_stay_in_their_formats(name, policy):
    run = trained(name, policy)
    after = dict(run.model.named_buffers())
    assert list(after) == list(run.buffers)
    for key, before in run.buffers.items():
        assert after[key].dtype == before.dtype, key
        if "running_" in key or "num_batches_tracked" in key:
            assert not torch.equal(after[key], before), key
            assert after[key].isfinite().all()
        else:
            assert torch.equal(after[key], before), key


def tied_weights_stay_one_tensor(name, policy):
    run = trained(name, policy)
    named = dict(run.model.named_parameters(remove_duplicate=False))
    for one, other in ZOO[name].tied:
        assert named[one] is named[other]
        assert sum(key in run.precision.named_parameters() for key in (one, other)) == 1
    assert ZOO[name].tied or len(named) == len(dict(run.model.named_parameters()))


# --- what comes out ------------------------------------------------------------------------------


class LossDtypes(TorchDispatchMode):
    """The formats of what goes into the last operation of every cross entropy."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss.default):
            self.found.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def outputs_and_the_models_own_loss_are_fp32(name, policy):
    run, batch = trained(name, policy), ZOO[name].batch()
    hidden = {} if name in ("convnext", "resnet") else {"output_attentions": False}
    with torch.no_grad(), run.precision.autocast(), LossDtypes() as losses:
        output = run.model(**batch, output_hidden_states=True, **hidden)
    assert isinstance(output, ModelOutput)
    assert losses.found
    assert set(losses.found) == {F32}
    found = dict(floats(output))
    assert {tensor.dtype for tensor in found.values()} == {F32}
    assert "loss" in found
    assert output["loss"] is output.loss is output[0]  # by key, attribute and place
    cached = getattr(output, "past_key_values", None)
    if cached is not None and name != "mamba":
        layers = getattr(cached, "self_attention_cache", cached).layers
        if policy in LOW:
            assert layers[0].keys.dtype == run.precision.policy.compute_dtype
        assert layers[0].values.isfinite().all()


# --- resuming ------------------------------------------------------------------------------------


def a_fresh_model_goes_on_bit_for_bit(name, policy):
    run, batch = trained(name, policy), ZOO[name].batch()
    states = [copy.deepcopy(part.state_dict()) for part in (run.model, run.optimizer)]
    state = copy.deepcopy(run.precision.state_dict())
    fresh = begin(name, spelled(name, policy))
    missing = fresh.model.load_state_dict(states[0])
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    fresh.optimizer.load_state_dict(states[1])
    fresh.precision.load_state_dict(state)
    one, other = (step(each, batch, STEPS) for each in (run, fresh))
    run.results.pop()
    assert one == other
    for (key, a), (_, b) in zip(
        run.precision.masters.items(), fresh.precision.masters.items(), strict=True
    ):
        assert torch.equal(a, b), key
    for one, other in ZOO[name].tied:
        named = dict(fresh.model.named_parameters(remove_duplicate=False))
        assert named[one] is named[other]


# --- the tools -----------------------------------------------------------------------------------


def the_lost_update_meter_reads_every_model(name, policy):
    run = trained(name, policy)
    reports = run.meter.report()
    assert len(reports) == 1
    (report,) = reports
    assert report.elements > 0
    assert 0 <= report.lost <= 1
    value = run.precision.policy
    if policy in ("fp32", "bf16-mixed", "bf16-master", "bf16-split"):
        assert report.lost < 0.01  # fp32 loses what is below 2^-25 of a weight
    if policy == "bf16-pure":
        assert report.lost > 0.01
    assert report.stored.startswith(dtype_name(value.master_dtype if value.has_masters
                                               else value.param_dtype))  # fmt: skip


@pytest.mark.parametrize(("name", "policy"), PAIRS)
def test_a_pair_trains_keeps_its_formats_and_resumes(name, policy):
    the_loss_falls(name, policy)
    the_curve_is_that_of_fp32(name, policy)
    parameters_and_masters_are_in_the_policys_formats(name, policy)
    every_trained_weight_moves(name, policy)
    buffers_stay_in_their_formats(name, policy)
    tied_weights_stay_one_tensor(name, policy)
    outputs_and_the_models_own_loss_are_fp32(name, policy)
    the_lost_update_meter_reads_every_model(name, policy)
    a_fresh_model_goes_on_bit_for_bit(name, policy)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", REFUSED)
def test_what_a_cpu_or_one_device_cannot_honour_is_refused_by_name(policy):
    model = ZOO["bert"].make()
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    with pytest.raises(PrecisionError, match=REFUSED[policy]):
        halfstep.Precision(policy, model, optimizer_for(model, ZOO["bert"], policy))
    assert all(torch.equal(value, before[key]) for key, value in model.named_parameters())


@pytest.mark.parametrize("policy", LOW)
def test_running_statistics_under_16_bit_weights_are_refused_with_the_rule_that_helps(policy):
    model = ZOO["resnet"].make()
    found = (
        r"resnet.embedder.embedder.normalization is a BatchNorm2d with running statistics in fp32, "
        rf"whose kernels take no (bf16|fp16) weights; .*keep_fp32={ZOO['resnet'].keep}$"
    )
    with pytest.raises(PrecisionError, match=found):
        halfstep.Precision(policy, model, optimizer_for(model, ZOO["resnet"], policy))
    assert {p.dtype for p in model.parameters()} == {F32}


@pytest.mark.parametrize("policy", ["bf16-split", "bf16-split24", "bf16-kahan", "bf16-sr"])
def test_torchs_optimizer_is_refused_where_only_ours_keeps_the_weights(policy):
    model = ZOO["bert"].make()
    with pytest.raises(PrecisionError, match=f"{policy} needs an optimizer .*AdamW does not.*"):
        halfstep.Precision(policy, model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gemma2"])
def test_rotary_tables_that_were_cast_by_model_to_are_refused(name):
    model = ZOO[name].make().to(B16)
    with pytest.raises(PrecisionError, match=r"inv_freq \(rope\) is bf16 already"):
        halfstep.Precision("bf16-master", model, torch.optim.AdamW(model.parameters()))
