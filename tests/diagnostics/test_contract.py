"""The contract finds operations and states that run in another dtype, and nothing else."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diagnostics.contract_programs import BF16, FP16, RMSNorm, trained
from halfstep.diagnostics.contract import Contract, contract, united
from halfstep.errors import DataError

PLANTED = {  # fault: section, row, dtype, and the only module or parameter that has it
    "norm": ("operations", "forward  blocks.*  cast", "fp32 -> bf16"),
    "rms_norm": ("operations", "forward  blocks.*.attn.norm  mean", "bf16 -> bf16"),
    "softmax": ("operations", "forward  blocks.*.attn  softmax", "bf16 -> bf16"),
    "sdpa": ("operations", "forward  blocks.*.attn  attention", "bf16 -> bf16"),
    "rope": ("buffers", "blocks.*.attn.cos", "bf16"),
    "gate": ("operations", "forward  blocks.*.gate  matmul", "bf16 -> bf16"),
    "residual": ("operations", "forward  blocks.*  add", "bf16 -> bf16"),
    "no_autocast": ("operations", "forward  blocks.*.mlp  matmul", "fp32 -> fp32", "blocks.1.mlp"),
    "rounded_activation": ("operations", "forward  blocks.*  cast", "bf16 -> fp16", "blocks.1"),
    "rounded_logits": ("operations", "forward  -  cast", "fp32 -> bf16"),
    "loss": ("operations", "forward  -  log_softmax", "bf16 -> bf16"),
    "fp16": ("operations", "forward  head  matmul", "fp16 -> fp16"),
    "pure": ("parameters", "head.weight", "bf16"),
    "pure_no_autocast": ("gradients", "head.weight", "bf16"),
    "embedding": ("parameters", "embed.weight", "bf16"),
    "one_layer": ("parameters", "blocks.*.mlp.weight", "bf16", "blocks.1.mlp.weight"),
    "grad_dtype": ("gradients", "head.weight", "bf16"),
    "grad_hook": ("operations", "backward  head  cast", "fp32 -> bf16"),
    "grad_round": ("operations", "forward  -  cast", "fp32 -> bf16"),
    "buffer_grads": ("operations", "forward  -  add", "bf16 -> bf16"),
    "clip": ("operations", "forward  -  norm", "bf16 -> bf16"),
    "moments": ("states", "exp_avg_sq", "bf16"),
    "step_count": ("states", "step", "bf16"),
    "muon_bf16": ("operations", "update  -  matmul", "bf16 -> bf16"),
    "weights_rounded": ("operations", "no_grad  -  cast", "fp32 -> bf16"),
    "average": ("operations", "no_grad  -  mul", "bf16 -> bf16"),
}
BASE = {"grad_dtype": "sgd", "muon_bf16": "muon"}
SOUND = [
    {},
    {"seed": 3},
    {"batch": 1},
    {"batch": 7},
    {"steps": 1},
    {"steps": 5},
    {"accumulate": 3},
    {"layers": 3},
    {"evaluate": True},
    {"batch": 1, "accumulate": 2, "steps": 1, "evaluate": True},
]


@pytest.fixture(scope="module")
def sound():
    torch.set_num_threads(1)
    return {kind: trained(kind) for kind in ("", "sgd", "muon")}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_regression_is_found_and_named(sound, fault):
    section, row, form, *where = PLANTED[fault]
    found = sound[BASE.get(fault, "")].differences(trained(fault))
    (one,) = [d for d in found if (d.name, d.values["row"]) == (section, row)]
    assert form in one.values["new"]
    assert not where or one.where == tuple(where)


@pytest.mark.parametrize("change", SOUND, ids=str)
def test_a_sound_change_is_no_difference(sound, change):
    now = trained(**change)
    assert sound[""].differences(now) == []
    assert now.differences(sound[""]) == []


def small(model, loss, optimizer=None, low=BF16, scaler=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with contract() as seen:
        for _ in range(2):
            with torch.autocast("cpu", low):
                value = loss(model)
            (scaler.scale(value) if scaler else value).backward()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
    return seen.recorded()


def rows(found, section="operations"):
    return found.lines().get(section, [])


def test_a_loss_scale_that_is_dropped_is_a_difference():
    def loss(model):
        return model(torch.ones(2, 4)).float().mean()

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaled, bare = small(model, loss, low=FP16, scaler=scaler), small(model, loss, low=FP16)
    (lost,) = [d.what for d in scaled.differences(bare) if d.values["gone"]]
    assert "amp_foreach_non_finite_check_and_unscale is absent" in lost


def test_a_checkpointed_forward_is_a_forward_and_a_teacher_is_none():
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = RMSNorm(4)

        def forward(self, x):
            run = torch.utils.checkpoint.checkpoint
            return run(self.norm, x.requires_grad_(), use_reentrant=True)

    def loss(model):
        with torch.no_grad():
            wanted = teacher(torch.ones(2, 4))
        return (model(torch.ones(2, 4)) - wanted).float().pow(2).mean()

    teacher = nn.Sequential(nn.Linear(4, 4))
    found = small(Student(), loss)
    assert "forward  norm  rsqrt: fp32 -> fp32" in rows(found)
    assert "no_grad  *  matmul: bf16 -> bf16" in rows(found)
    assert small(Student(), loss, low=FP16).differences(found)
    assert not any(row.startswith("forward  *") for row in rows(found))


def test_wrappers_add_nothing_to_names():
    def loss(model):
        return model(torch.ones(2, 4)).float().mean()

    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    plain, wrapped = small(model, loss), small(Wrapped(model), loss)
    compiled = small(torch.compile(model, backend="eager"), loss)
    assert rows(plain) == rows(wrapped) == rows(compiled)
    assert "forward  *  matmul: bf16 -> bf16" in rows(plain)


def test_a_closure_and_a_loop_without_modules():
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.LBFGS([weight], max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(torch.ones(2, 4) @ weight, torch.zeros(2, 4))
        loss.backward()
        return loss

    with contract() as seen:
        optimizer.step(closure)
    found = rows(seen.recorded())
    assert {"forward  -  matmul: fp32 -> fp32", "update  -  arithmetic: fp32 -> fp32",
            "backward  -  mse_loss_backward: fp32 -> fp32"} <= {*found}  # fmt: skip
    assert rows(seen.recorded(), "gradients") == ["-: fp32"]


def test_torch_adds_a_bias_apart_for_some_shapes():
    def of(batch):
        def loss(model):
            mask = (torch.arange(5) > 3).expand(batch, 5)
            y = model(torch.randn(batch, 5, 8), src_key_padding_mask=mask)
            return (y.float() * mask[..., None].float()).pow(2).mean()

        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return small(layer, loss)

    assert of(1).differences(of(4)) == of(4).differences(of(1)) == []


def test_it_changes_no_bit():
    def weights(seen):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4))
        optimizer = torch.optim.AdamW(model.parameters())
        with seen:
            for _ in range(3):
                with torch.autocast("cpu", BF16):
                    model(torch.randn(8, 4)).float().square().mean().backward()
                optimizer.step()
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(weights(torch.enable_grad()), weights(contract()))


def test_the_file_holds_the_rows_one_a_line_and_sorted(sound, tmp_path):
    file = tmp_path / "precision.json"
    sound[""].write(file)
    again = Contract.read(file)
    assert {*again.rows} == {*sound[""].rows}
    lines = file.read_text().splitlines()
    assert '   "forward  blocks.*.attn  softmax: fp32 -> fp32",' in lines
    assert all(part == sorted(part) for part in json.loads(file.read_text())["rows"].values())
    file2 = tmp_path / "again.json"
    again.write(file2)
    assert file2.read_bytes() == file.read_bytes()


def test_the_text_reads_like_a_diff(sound):
    text = sound[""].text(trained("step_count"), "precision.json and 1 rank of train.py")
    assert text.splitlines()[0].endswith("rows differ")
    assert " states\n  - step: fp32\n  + step: bf16" in text
    other = Contract({("states", "x", "fp32"): set()}, 1, {}, "2.0.0")
    text = other.text(sound[""], "x")
    assert "note: torch 2.0.0 wrote the file" in text


def test_a_rank_or_an_axis_of_its_own():
    def part(rank, form, world=2):
        row = "backward  dp  reduce_scatter  gradients"
        rows = {("collectives", row, form): {""}, ("states", "step", "fp32"): {""}}
        return Contract(rows, world, {"dp": world}, "2.13.0", rank, 2, ["fp32"])

    both = united([part(0, "fp32"), part(1, "bf16")])
    (one,) = united([part(0, "fp32"), part(1, "fp32")]).differences(both)
    assert one.where == ("rank 1",)
    assert [f.values["axis"] for f in both.findings()] == ["dp"]
    alone = Contract({("states", "step", "fp32"): set()}, 1, {}, "2.13.0")
    assert part(0, "fp32").differences(alone) == alone.differences(part(0, "fp32")) == []
    assert "1 of 2 ranks ran, without dp" in part(0, "fp32").text(alone, "x")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"format": 2}', '{"format": 1, "rows": []}', "\0\1",
     '{"format": 1, "rows": {"a": ["b"]}, "world": 1, "axes": {}, "torch": ""}',
     '{"format": 1, "rows": {"operations": ["b: c"]}, "world": 1, "axes": {}, "torch": ""}',
     '{"format": 1, "rows": {}, "world": 1, "axes": 3, "torch": ""}',
     '{"format": 1, "rows": {}, "world": 1, "axes": {}, "torch": "", "more": 1}'],
)  # fmt: skip
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, content):
    file = tmp_path / "precision.json"
    file.write_text(content)
    with pytest.raises(DataError, match="halfstep contract record") as refused:
        Contract.read(file)
    assert str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value)
    file.unlink()
    with pytest.raises(DataError, match="No such file"):
        Contract.read(file)
    with pytest.raises(DataError):
        Contract.read(tmp_path)
