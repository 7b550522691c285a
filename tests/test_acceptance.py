"""What users of mixed precision complain of, one test per complaint that concerns one process.

The letters are those of the list of complaints that halfstep was made against. The two that need
several ranks (an overflow on one rank only, sharded and plain parameters in one optimizer) are not
here.
"""

import copy
import math

import pytest
import torch
from torch import nn

import halfstep
from halfstep import NonFiniteError, Precision, PrecisionError
from halfstep.optim import AdamW
from reference.training import OPTIMIZERS, batches, mlp, mse, scaled


def poisoned(parameter, value):
    return parameter.register_hook(lambda g: torch.full_like(g, value))


@pytest.mark.parametrize("kind", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("make", ["Precision", "GradScaler"])
def test_b_every_kind_of_optimizer_tells_that_it_skipped(make, kind):
    """Fused optimizers are called on overflow, so counting calls is wrong."""
    model = mlp()
    optimizer = OPTIMIZERS[f"adamw-{kind}"](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ema = halfstep.EMA(model, decay=0.5)
    if make == "Precision":
        precision = Precision(
            scaled("fp16-mixed"), model, optimizer, schedulers=[schedule], ema=ema
        )
    else:
        scaler = halfstep.GradScaler("cpu", init_scale=256.0)
    seen = []
    for number, (x, y) in enumerate(batches(3)):
        before = [p.detach().clone() for p in model.parameters()]
        handle = poisoned(model[0].weight, math.inf) if number == 1 else None
        if make == "Precision":
            with precision.autocast():
                loss = mse(model(x), y)
            result = precision.step(loss)
        else:
            optimizer.zero_grad()
            scaler.scale(mse(model(x), y)).backward()
            scaler.step(optimizer)
            result = scaler.last_step
            scaler.update()
            if result.applied:
                schedule.step()
                ema.update_(model.named_parameters())
        if handle:
            handle.remove()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == result.applied
        seen.append((result.applied, result.reason))
    assert seen == [(True, None), (False, "overflow"), (True, None)]
    assert schedule.last_epoch == 2
    assert ema.updates == 2


def test_c_a_nan_loss_stops_at_once_and_leaves_the_scale():
    model = mlp()
    optimizer = OPTIMIZERS["adamw-loop"](model.parameters())
    precision = Precision(scaled("fp16-mixed"), model, optimizer)
    before = precision.state_dict()["loss_scale"]
    for _ in range(60):
        x, y = batches(1)[0]
        with precision.autocast():
            loss = mse(model(x), y) * math.nan
        with pytest.raises(NonFiniteError, match="no loss scale can help") as error:
            precision.step(loss)
        assert error.value.cause == "forward"
    assert precision.state_dict()["loss_scale"] == before


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.mlp(x)


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("policy", ["fp16-mixed", "fp16-master"])
def test_d_an_overflow_in_a_residual_addition_is_named(policy):
    """Both terms are finite in fp16, their sum is not: no module's own output shows it first."""
    model = Stream()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.weight.copy_(torch.eye(4))
            block.mlp.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = Precision(policy, model, optimizer)
    x = torch.full((2, 4), 6000.0, dtype=torch.float16)  # doubles in every block: 96000 in the last
    with halfstep.trace_nonfinite(model) as trace, precision.autocast():
        model(x)
    cause = trace.first_cause
    assert cause is not None
    assert cause.module == "blocks.3"
    assert "add" in cause.op
    assert cause.kind == "overflow"
    for word in ("blocks.3", "add", "65504"):
        assert word in str(cause)


GAINS = 512


@pytest.mark.parametrize(
    ("policy", "moved"),
    [("bf16-pure", 0), ("bf16-master", GAINS), ("bf16-split", GAINS), ("bf16-split24", GAINS),
     ("bf16-kahan", GAINS), ("bf16-sr", GAINS)],
)  # fmt: skip
def test_e_a_gain_of_1_in_bf16_is_frozen_and_the_meter_says_so(policy, moved):
    model = nn.Module()
    model.gain = nn.Parameter(torch.ones(GAINS))
    own = policy not in ("bf16-pure", "bf16-master")
    optimizer = (AdamW if own else torch.optim.AdamW)([model.gain], lr=1e-3, weight_decay=0.0)
    precision = Precision(policy, model, optimizer)
    meter = halfstep.LostUpdateMeter(precision, every=1)
    for step in range(60):
        generator = torch.Generator().manual_seed(step)
        direction = 1 + 0.1 * torch.rand(GAINS, generator=generator)
        precision.backward((model.gain.float() * direction).sum())
        precision.step()
        if step == 0:
            first = meter.report()[0]
    meter.close()
    changed = (model.gain != 1).sum().item()
    assert changed == moved
    assert first.lost == (1.0 if policy == "bf16-pure" else 0.0)
    if policy == "bf16-pure":
        assert "bf16-split" in first.verdict


def test_f_a_resume_has_the_scale_that_was_saved_and_goes_on_bitwise():
    def parts():
        model = mlp()
        optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
        return model, optimizer, Precision("fp16-mixed,init_scale=256", model, optimizer)

    def run(model, precision, numbers):
        losses = []
        for number in numbers:
            x, y = batches(20)[number]
            with precision.autocast():
                loss = mse(model(x), y)
            losses.append(precision.step(loss).loss)
        return losses

    model, optimizer, precision = parts()
    run(model, precision, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), precision.state_dict()))
    straight = run(model, precision, range(5, 20))
    other, fresh, again = parts()
    other.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    again.load_state_dict(saved[2])
    assert again.loss_scale.value == 256
    assert run(other, again, range(5, 20)) == straight


def test_g_clipping_never_turns_an_infinity_into_nan():
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = Precision("fp32", model, optimizer)
    before = model.weight.detach().clone()
    handle = model.weight.register_hook(lambda g: torch.tensor([[1.0, math.inf, 1.0]]))
    with pytest.raises(NonFiniteError, match="weight") as error:
        precision.step(model(torch.ones(1, 3)).sum(), max_norm=1.0)
    handle.remove()
    assert error.value.parameters == ("weight",)
    assert torch.equal(model.weight, before)


def test_h_a_16_bit_base_with_adapters_is_refused_or_upcast_before_step_1():
    model = nn.ModuleDict({"base": nn.Linear(8, 8), "adapter": nn.Linear(8, 8)}).half()
    model["base"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["adapter"].parameters())
    with pytest.raises(PrecisionError, match=r"adapter\.weight.*144 bytes"):
        Precision("fp16-mixed", model, optimizer)
    scaler = halfstep.GradScaler("cpu", names=model.named_parameters())
    with pytest.raises(PrecisionError, match=r"adapter\.weight"):
        scaler.check(optimizer)
    Precision("fp16-mixed", model, optimizer, upcast_trainable=True)
    assert {n: p.dtype for n, p in model.named_parameters()} == {
        "base.weight": torch.float16,
        "base.bias": torch.float16,
        "adapter.weight": torch.float32,
        "adapter.bias": torch.float32,
    }


def test_k_an_overflow_at_the_first_scale_is_calibration():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    precision = Precision("fp16-mixed", model, optimizer)  # 2^16 > 65504
    with precision.autocast():
        loss = model(torch.ones(1, 1)).sum()
    result = precision.step(loss)  # warnings are errors in these tests
    assert (result.applied, result.calibrating, result.reason) == (False, True, "overflow")
    with precision.autocast():
        loss = model(torch.ones(1, 1)).sum()
    assert precision.step(loss).applied


def test_l_a_rope_table_in_16_bits_is_refused_and_a_doubled_mask_stays_finite():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4))
    model.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64))
    model.to(torch.bfloat16)
    with pytest.raises(PrecisionError, match="inv_freq"):
        Precision("bf16-master", model, torch.optim.SGD(model.parameters()))
    for dtype in (torch.float16, torch.bfloat16):
        mask = torch.zeros(2, 4, dtype=dtype)
        mask[:, 2:] = halfstep.mask_value(dtype)
        scores = torch.full((2, 4), 50.0, dtype=dtype) + mask + mask
        assert scores.isfinite().all()
        assert (torch.softmax(scores, -1)[:, 2:] == 0).all()


def test_m_a_nan_run_never_evicts_the_last_finite_checkpoint(tmp_path):
    from halfstep.trainer.checkpoint.store import Checkpoint, list_checkpoints, save_part

    good = Checkpoint({"w": torch.ones(2)}, {}, {"step": 1})
    save_part(tmp_path, 1, good.part(0, 1), keep=1)
    for step in range(2, 5):
        bad = Checkpoint({"w": torch.tensor([1.0, math.nan])}, {}, {"step": step})
        with pytest.raises(NonFiniteError):
            save_part(tmp_path, step, bad.part(0, step), keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-master", "bf16-split", "bf16-sr"])
def test_n_micro_batches_add_up_in_fp32(policy):
    """4 + 255 x 0.01 is 6.55; added in bf16 it stays at 4."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    precision = Precision(policy, model, AdamW([model.weight]))
    for size in (4.0, *[0.01] * 255):
        precision.backward((model.weight * torch.tensor([size])).float().sum())
    (gradient,) = precision.masters.gradients(precision.named_parameters().values()).values()
    small = torch.tensor(0.01, dtype=gradient.dtype).item()
    # each 0.01 is rounded to bf16 on its way through a bf16 weight: half a gap of 2^-14
    assert gradient.item() == pytest.approx(4 + 255 * small, abs=255 * 2.0**-15)
    assert gradient.dtype == torch.float32
