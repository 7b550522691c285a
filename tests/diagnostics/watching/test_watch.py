"""``halfstep.watch`` in the loops that people write: what is counted, once, and nothing changed."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import load_numerics, watch
from halfstep.diagnostics.statistics.watch import StepNumerics
from halfstep.errors import CheckpointError, DataError, NonFiniteError, PrecisionError
from halfstep.trainer.models import GPTConfig
from halfstep.trainer.models.gpt import GPT


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def data(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 16, generator=generator)
    return x, torch.randint(0, 4, (8,), generator=generator)


def elements(step: StepNumerics, kind: str) -> dict[str, int]:
    return {one.name: one.elements for one in step.of(kind)}


# Loops. Each takes a watch or None, and returns losses and weights.


def bare(steps: int, make, scaled: bool = False):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20) if scaled else None
    losses = []
    with make(model, optimizer, scaler) as watched:
        for step in range(steps):
            x, y = data(step)
            with torch.autocast("cpu", torch.float16 if scaled else torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            losses.append(loss.item())
            if scaler is None:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()], watched


def gpt(make, policy: str, checkpointing: bool):
    shape = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=97,
                      activation_checkpointing=checkpointing)  # fmt: skip
    model = GPT(shape, seed=0)
    kind = halfstep.optim.AdamW if "split" in policy else torch.optim.AdamW
    precision = halfstep.Precision(policy, model, kind(model.parameters(), lr=1e-2))
    losses = []
    with make(model, precision, None) as watched:
        for step in range(5):
            g = torch.Generator().manual_seed(step)
            with precision.autocast():
                total, count = model.loss_sum(tuple(torch.randint(97, (2, 4, 32), generator=g)))
            losses.append(precision.step(total / count, max_norm=1.0).loss)
    return losses, [p.detach().clone() for p in model.parameters()], watched


def unwatched(*_):
    return contextlib.nullcontext()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_bare_loop_keeps_its_bits(scaled):
    losses, weights, _ = bare(7, unwatched, scaled)
    watched = bare(7, lambda *given: watch(*given[:2], scaler=given[2], every=3), scaled)
    assert losses == watched[0]
    assert all(map(torch.equal, weights, watched[1]))
    assert watched[2].report().step == 6


def every_step(model, source, scaler):
    return watch(model, source, scaler=scaler, every=1)


ALL = ["fp32", "bf16-mixed", "fp16-master", "bf16-split,moments=8bit"]


@pytest.mark.covering
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("policy", ALL)
def test_a_gpt_of_torch_s_operations_keeps_its_bits(policy, checkpointing, torch_alone):
    losses, weights, _ = gpt(unwatched, policy, checkpointing)
    watched = gpt(every_step, policy, checkpointing)
    assert losses == watched[0]
    assert all(map(torch.equal, weights, watched[1]))
    found = watched[2].report()
    assert found.step == 5
    for kind in ("activation", "activation_gradient"):
        assert elements(found, kind) == {
            **{name: 4 * 32 * 64 for name in ("wte", "dropout", "final_norm")}, "wpe": 32 * 64,
            **{f"layers.{i}{name}": 4 * 32 * 64 * n for i in (0, 1) for name, n in BLOCK.items()},
        }  # fmt: skip


BLOCK = {".attn_norm": 1, ".attn.qkv": 3, ".attn.proj": 1, ".mlp_norm": 1, ".mlp.up": 4,
         ".mlp.down": 1, "": 1}  # fmt: skip


def test_a_fused_optimizer_which_is_called_on_overflow_too():
    model, seen = network(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with watch(model, optimizer, scaler=scaler, every=1) as watched:
        for factor in (math.inf, 1.0):
            scaler.scale(F.cross_entropy(model(data()[0]), data()[1]) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(watched.report())
    broken, sound = seen
    assert not broken.applied
    assert sound.applied
    assert sound.loss_scale == 2.0**19
    model = network()
    F.cross_entropy(model(data()[0]), data()[1]).backward()
    for one in sound.of("gradient"):  # a power of two scales exactly
        assert one.absmax == model.get_parameter(one.name).grad.abs().max()


def test_a_stopped_run_tells_of_its_last_step():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = halfstep.Precision("bf16-mixed", model, optimizer)
    watched = watch(model, precision)
    with pytest.raises(NonFiniteError), watched, precision.autocast():
        precision.step(F.cross_entropy(model(data()[0] * math.inf), data()[1]))
    found = watched.report()
    assert not found.applied


class Once(nn.Module):
    """A module that checkpoints, shares, passes on and returns in every way."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)
        self.same, self.frozen = nn.Identity(), nn.Linear(4, 4).requires_grad_(False)
        self.parts = Parts()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            x = self.inner(x)
        else:
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        x = self.frozen(self.twice(self.twice(self.same(x))))
        first, rest = self.parts(x)
        return first + rest["b"] + rest["c"][1]


class Parts(nn.Module):
    def forward(self, x: Tensor):
        return x * 2, {"b": x + 1, "c": [torch.ones(1, dtype=torch.long), x * 3], "d": "text"}


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_each_tensor_is_counted_once(reentrant):
    torch.manual_seed(0)
    model = Once(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, every=1) as watched:
        for _ in range(2):  # micro-batches
            model(torch.randn(3, 4, requires_grad=True)).sum().backward()
        with torch.no_grad():
            model(torch.randn(3, 4, requires_grad=True))  # an evaluation
        optimizer.step()
    found = watched.report()
    want = {"inner": 24, "twice": 48, "frozen": 24, "parts": 24, "parts[1]": 24,
            "parts[3]": 24, "Once": 24}  # fmt: skip
    assert elements(found, "activation") == want
    assert elements(found, "activation_gradient") == want
    trained = {"inner.weight", "inner.bias", "twice.weight", "twice.bias"}
    for kind in ("weight", "gradient"):
        assert set(elements(found, kind)) == trained
    names = Counter((one.kind, one.name, one.dtype) for one in found.tensors)
    assert set(names.values()) == {1}


def test_several_optimizers_end_a_step_together():
    a, b = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.Sequential(a, b)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b))
    with watch(model, [first, second], every=2) as watched:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            first.step()
            second.step()
        assert watched.report().step == 2
        assert len(watched.report().of("weight")) == 4
        first.step()
        first.step()  # a step of this optimizer alone has ended here
        second.step()
        model(torch.ones(2, 4)).sum().backward()
        first.step()
        second.step()
    assert watched.report().step == 4


def test_nothing_is_left_behind():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = halfstep.GradScaler("cpu")
    held = [dict(vars(one)) for one in (scaler, optimizer)]
    with watch(model, optimizer, scaler=scaler, every=3):
        out = model(data()[0])
        assert model[0]._forward_hooks
    out.sum().backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert [set(vars(one)) for one in (scaler, optimizer)] == [set(one) for one in held]
    assert not optimizer._optimizer_step_pre_hooks
    precision = halfstep.Precision("bf16-mixed", model, optimizer)
    watched = watch(model, precision)
    with watched, watched, watch(model, precision):
        pass
    assert "step" not in vars(precision)
    assert "gradients" not in vars(precision.masters)


def test_the_file_and_a_resumed_run(tmp_path):
    path = tmp_path / "numerics.jsonl"
    for _ in range(2):  # a second run begins it anew
        bare(7, lambda model, source, _: watch(model, source, every=3, to=path))
        assert [step.step for step in load_numerics(path)] == [1, 3, 6]
    bare(6, lambda model, source, _: watch(model, source, every=3, to=str(path), start=4))
    found = load_numerics(tmp_path)
    assert [step.step for step in found] == [1, 3, 6, 9]
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))


def test_a_cut_line_is_left_out(tmp_path):
    path = tmp_path / "numerics.jsonl"
    *_, watched = bare(3, lambda model, source, _: watch(model, source, every=3, to=path))
    text = path.read_text()
    path.write_text(text[:-100] + '\n[]\n{"step": 1}\n' + text.splitlines()[1] + "\n")
    assert len(load_numerics(path)) == 2
    assert load_numerics(path)[1] == watched.report()
    with pytest.raises(DataError, match="No such file"):
        load_numerics(tmp_path / "other.jsonl")


def test_the_table_shows_the_worst_and_what_to_make_of_it():
    model = network()
    with torch.no_grad():
        model[3].weight.mul_(1e6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watched = watch(model, optimizer)
    assert str(watched) == "no step has been watched yet"
    with watched:
        (model(data()[0])[:, 0].sum() * 1e-14).backward()
        optimizer.step()
    step, text = watched.report(), str(watched)
    assert text.splitlines()[2].startswith("activation 3 ")
    assert any(line.startswith("weight 3.weight") for line in text.splitlines()[3:5])
    assert "fp16 would overflow in 2 weights and outputs, most in activation" in text
    assert "fp16 gradients: loss scales from 2^" in text
    assert "; without a scale 99." in text
    assert len(step.table(rows=99).splitlines()) > len(text.splitlines())
    assert "e5m2: flushed" in step.table("e5m2")


def test_what_is_refused(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for broken in ({"every": 0}, {"start": -1}, {"source": "adam"}, {"source": [model]}):
        with pytest.raises(PrecisionError, match="allowed"):
            watch(model, **{"source": optimizer} | broken)
    with pytest.raises(PrecisionError, match=r"allowed: a torch\.nn\.Module"):
        watch(optimizer)
    with pytest.raises(CheckpointError, match="cannot be written"):
        watch(model, optimizer, to=tmp_path / "none" / "n.jsonl").__enter__()


@pytest.mark.parametrize("found", [True, False], ids=["given", "found"])
def test_a_closures_gradients_are_those_of_its_step(found, tmp_path):
    # As Lightning steps: zero_grad, forward and backward are all in the closure.
    model, norms = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(data()[0]).square().mean()
        loss.backward()
        norms.append(float(model[0].weight.grad.abs().max()))
        return loss

    with watch(model, optimizer if found else None, every=1, to=tmp_path / "n.jsonl"):
        optimizer.step(closure)
        optimizer.step(closure=closure)
    gradients = [step.of("gradient")[0] for step in load_numerics(tmp_path / "n.jsonl")]
    assert [one.absmax for one in gradients] == norms


@pytest.mark.parametrize("policy", ["fp32", "bf16-split"])
def test_copies_and_pickles_made_inside_are_plain(policy):
    model = network()
    precision = halfstep.Precision(policy, model, halfstep.optim.AdamW(model.parameters()))
    with watch(model, precision, every=1) as watched:
        for _ in range(2):
            copied, saved = copy.deepcopy(model), io.BytesIO()
            torch.save(model, saved)
            for module in copied.modules():
                assert not module._forward_hooks
                assert not module._forward_pre_hooks
            assert b"halfstep" not in saved.getvalue()
            with precision.autocast():
                loss = model(data()[0]).float().mean()
            precision.step(loss)
            copied(data()[0])
            assert watched.report().of("activation")[0].elements == 8 * 32  # not the copy's


def test_complex_empty_and_scalar_parameters():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.complex = nn.Parameter(torch.full((4, 4), 3 - 4j))
            self.empty = nn.Parameter(torch.empty(0))
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.whole = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)

        def forward(self, x):
            return (x.to(torch.complex64) @ self.complex).abs() * self.scalar + self.empty.sum()

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with watch(model, optimizer, every=1) as watched:  # torch warns of a dropped imaginary part
        model(torch.randn(16, 4)).sum().backward()
        optimizer.step()
    found = {(one.kind, one.name): one for one in watched.report().tensors}
    weight = found["weight", "complex"]
    assert (weight.elements, weight.absmax, weight.exponents) == (32, 4.0, {1: 16, 2: 16})
    assert found["gradient", "complex"].elements == 32
    assert found["weight", "empty"].elements == 0
    assert found["weight", "scalar"].absmax == 2
    assert ("weight", "whole") not in found
    assert "weight empty" in watched.report().table(rows=None)
