"""Two runs that differ in one thing: the first operation that does so is named, and why."""

from __future__ import annotations

import copy
import json
import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.cli.main import main
from halfstep.errors import DataError, PrecisionError

LAYERS, WIDTH, HEADS, LENGTH, WORDS = 3, 32, 2, 16, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal, self.scale = True, HEADS**0.5 * WIDTH**-0.5

    def forward(self, x_BTD):
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.attn, self.n2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.act = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()
        self.down, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.drop(self.down(self.act(self.up(self.n2(x)))))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.nf, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids_BT):
        x = self.wte(ids_BT) + self.wpe(torch.arange(ids_BT.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.nf(x))


def batch(generator):
    start = torch.randint(0, WORDS, (8, 1), generator=generator)
    ids = (start + 3 * torch.arange(LENGTH + 1)) % WORDS
    return ids[:, :-1], ids[:, 1:].contiguous()


def loss_of(model, ids, targets):
    return F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten())


def trained(steps=20):
    torch.manual_seed(0)
    model, generator = Tiny(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        loss_of(model, *batch(generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trains a copy of one model, with something changed, and records it; returns the folder."""
    base, top = trained(), tmp_path_factory.mktemp("records")

    def run(
        name="a", change=None, amp=None, steps=2, edit=None, options=(), micro=1, after=None, seed=7
    ):
        folder = top / f"{name} {amp}"
        if folder.exists():
            return folder
        model = copy.deepcopy(base)
        torch.manual_seed(seed)
        if change is not None:
            change(model)
        kind, arguments = options or (torch.optim.AdamW, {"lr": 1e-3})
        optimizer = kind(model.parameters(), **arguments)
        generator = torch.Generator().manual_seed(5)
        with halfstep.record(model, folder, optimizer):
            for step in range(steps):
                ids, targets = batch(generator)
                ids, targets = edit(step, ids, targets) if edit else (ids, targets)
                parts = zip(ids.chunk(micro), targets.chunk(micro), strict=True)
                for part in parts:
                    with torch.autocast("cpu", amp or torch.bfloat16, enabled=amp is not None):
                        loss = loss_of(model, *part) / micro
                    loss.backward()
                if after:
                    after(step, model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        return folder

    return run


def put(path, **values):
    def change(model):
        for name, value in values.items():
            setattr(model.get_submodule(path), name, value)

    return change


def write(path, function):
    @torch.no_grad()
    def change(model):
        function(model.get_parameter(path))

    return change


class Wrong(torch.autograd.Function):
    """A GELU with a gradient that is 5 % too large."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad, x) * 1.05


class WrongGELU(nn.Module):
    def forward(self, x):
        return Wrong.apply(x)


def norm_in_bf16(model):
    norm = model.blocks[1].n1
    low = nn.LayerNorm(WIDTH, dtype=torch.bfloat16)
    low.load_state_dict(norm.state_dict())
    norm.forward = lambda x: F.layer_norm(x.bfloat16(), (WIDTH,), low.weight, low.bias).float()


def untie(model):
    model.head.weight = nn.Parameter(model.wte.weight.detach().clone())


def last_first(step, ids, targets):
    generator = torch.Generator().manual_seed(5)
    return [batch(generator) for _ in range(2)][1 - step]


def at(step, function):
    return lambda now, model, optimizer: function(model, optimizer) if now == step else None


def halve(model, _):
    for parameter in model.parameters():
        parameter.grad /= 2


SGD = (torch.optim.SGD, {"lr": 1e-3})
SLOW = (torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.95)})
# What is changed, and the first operation's module, name and cause; None: not looked at.
PLANTED = {
    "not causal": ({"change": put("blocks.1.attn", causal=False)},
                   "blocks.1.attn", "attention", "mask"),
    "scale x 2": ({"change": put("blocks.1.attn", scale=0.5)},
                  "blocks.1.attn", "attention", "scale"),
    "scale 5 %": ({"change": put("blocks.2.attn", scale=0.2625)},
                  "blocks.2.attn", "attention", "scale"),
    "eps": ({"change": put("blocks.1.n2", eps=1e-3)}, "blocks.1.n2", "layer_norm", "eps"),
    "a norm in bf16": ({"change": norm_in_bf16}, "blocks.1.n1", "layer_norm", "format"),
    "tanh": ({"change": put("blocks.1.act", approximate="tanh")},
             "blocks.1.act", "gelu", "activation"),
    "relu": ({"change": put("blocks.1", act=nn.ReLU())}, "blocks.1.act", "gelu", "activation"),
    "no norm": ({"change": put("blocks.2", n2=nn.Identity())},
                "blocks.2.n2", "layer_norm", "operation"),
    "a weight in 16 bits": ({"change": write("blocks.1.up.weight",
                                             lambda p: p.copy_(p.bfloat16()))},
                            "blocks.1.up", "addmm", "weight"),
    "one element": ({"change": write("blocks.1.down.weight", lambda p: p[0, 7].add_(1e-3))},
                    "blocks.1.down", "addmm", "weight"),
    "no bias": ({"change": write("blocks.1.attn.qkv.bias", lambda p: p.zero_())},
                "blocks.1.attn.qkv", "addmm", "weight"),
    "untied": ({"change": untie}, "wte", None, "tied weights"),
    "order of data": ({"edit": last_first}, "wte", "embedding", "data order"),
    "another sample": ({"edit": lambda s, x, y: (torch.cat([x[:7], x[:1]]), y)},
                       "wte", "embedding", "data"),
    "labels": ({"edit": lambda s, x, y: (x, y.roll(1, 1))}, "", "nll_loss_forward", "labels"),
    "lr of step 2": ({"after": at(1, lambda m, o: o.param_groups[0].update(lr=2e-3))},
                     None, "step", "optimizer"),
    "betas": ({"options": SLOW}, None, "step", "optimizer"),
    "another optimizer": ({"options": SGD}, None, "step", "optimizer"),
    "averaged twice": ({"after": at(0, halve)}, "", "gradients", "reduction"),
    "a wrong gradient": ({"change": put("blocks.1", act=WrongGELU())},
                         "blocks.1.act", None, "operation"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_the_first_operation_that_differs_is_named_with_its_cause(name, runs):
    changes, *expected = PLANTED[name]
    found = halfstep.compare(runs(), runs(name, **changes))
    got = found.first.module, found.first.operation, found.cause
    assert all(want in (None, has) for want, has in zip(expected, got, strict=True)), str(found)
    assert found.first.step == (2 if name == "lr of step 2" else 1)
    assert name != "a wrong gradient" or found.first.before == "equal in bits"


# Against a run in bf16 what decides an operation is exact, though its result is not.
ACROSS = [
    *("not causal", "scale x 2", "scale 5 %", "eps", "tanh", "relu", "no norm", "one element"),
    *("a weight in 16 bits", "no bias", "order of data", "another sample", "labels"),
]


@pytest.mark.parametrize("name", ACROSS)
def test_it_is_named_against_a_run_in_another_format(name, runs):
    changes, module, operation, cause = PLANTED[name]
    found = halfstep.compare(runs(amp=torch.bfloat16), runs(f"{name} fp32", **changes))
    assert (found.first.module, found.first.operation, found.cause) == (module, operation, cause)


def test_dropout_is_named_by_its_rate_and_its_seed(runs):
    def drops(rate):
        return lambda model: [put(f"blocks.{i}.drop", p=rate)(model) for i in range(LAYERS)]

    folders = [
        runs(f"drop {rate} {seed}", change=drops(rate), seed=seed)
        for rate, seed in ((0.1, 7), (0.1, 8), (0.2, 7))
    ]
    found = [halfstep.compare(folders[0], other) for other in folders[1:]]
    assert [each.first.module for each in found] == ["blocks.0.drop"] * 2
    assert [each.cause for each in found] == ["dropout seed", "dropout"]
    assert not halfstep.compare(folders[0], runs("drop again", change=drops(0.1))).found


def test_updates_that_are_lost_are_named(runs):
    small = {"options": (torch.optim.AdamW, {"lr": 1e-6, "weight_decay": 0.0}), "steps": 1}
    found = halfstep.compare(runs("kept", **small), runs("lost", nn.Module.bfloat16, **small))
    assert (found.first.direction, found.cause) == ("update", "lost update")


# --- runs that are equal but for rounding


def checkpointed(model):
    for block in model.blocks:
        block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=False)


def shuffled(step, ids, targets):
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    return ids[order], targets[order]


BF16, FP16 = torch.bfloat16, torch.float16
EQUAL = {
    "again": ({}, {}),
    "fp32 and bf16": ({}, {"amp": BF16}),
    "fp16 and bf16": ({"amp": FP16}, {"amp": BF16}),
    "fp32 and weights in bf16": ({}, {"change": nn.Module.bfloat16}),
    "micro-batches": ({}, {"micro": 4}),
    "micro-batches in bf16": ({}, {"micro": 2, "amp": BF16}),
    "rows permuted": ({}, {"edit": shuffled}),
    "rows permuted in bf16": ({"amp": BF16}, {"edit": shuffled, "amp": BF16}),
    "activation checkpointing": ({}, {"change": checkpointed}),
    "activation checkpointing in bf16": ({}, {"change": checkpointed, "amp": BF16}),
}


@pytest.mark.parametrize("name", EQUAL)
def test_no_alarm_for_runs_that_rounding_explains(name, runs):
    left, right = EQUAL[name]
    found = halfstep.compare(runs(**left), runs(f"equal {name}", **right))
    assert not found.found, str(found)
    assert found.aligned["steps"] == 2
    assert found.aligned["operations"] > 100


@pytest.mark.parametrize("amp", [None, BF16])
def test_no_alarm_for_other_attention_kernels_and_threads(amp, runs):
    with sdpa_kernel(SDPBackend.MATH):
        other = runs(f"math {amp}", amp=amp)
    assert not halfstep.compare(runs(amp=amp), other).found
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before % 2 + 1)
        other = runs(f"threads {amp}", amp=amp)
    finally:
        torch.set_num_threads(before)
    assert not halfstep.compare(runs(amp=amp), other).found


def test_a_measured_floor_is_room_for_more(runs):
    other = runs("tanh once", change=put("blocks.1.act", approximate="tanh"), amp=BF16)
    found = halfstep.compare(runs(amp=BF16), runs(), floor=[other])
    assert not found.found
    assert found.noise["source"] == "measured"


# --- what is recorded


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-master", "fp16-mixed"])
def test_a_recorded_step_trains_bit_for_bit_as_another(policy, tmp_path):
    def train(context):
        model = trained(0)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        precision = halfstep.Precision(policy, model, optimizer)
        generator = torch.Generator().manual_seed(3)
        with context(model, precision):
            for _ in range(3):
                with precision.autocast():
                    loss = loss_of(model, *batch(generator))
                precision.step(loss)
        assert torch._C._len_torch_dispatch_stack() == 0
        return [p.detach().clone() for p in model.parameters()]

    plain = train(lambda *_: nullcontext())
    recorded = train(lambda model, precision: halfstep.record(model, tmp_path / "r", precision))
    assert all(map(torch.equal, plain, recorded))
    assert json.loads((tmp_path / "r/record.json").read_text())["policy"] == policy
    assert not halfstep.compare(tmp_path / "r", tmp_path / "r").found


def test_steps_are_chosen_and_a_resumed_record_goes_on(tmp_path):
    model, ids = nn.Linear(4, 2), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(n, **options):
        with halfstep.record(model, tmp_path, **options):  # the optimizer is found
            for _ in range(n):
                model(ids).sum().backward()
                optimizer.step()
        return [int(path.name[5:13]) for path in sorted(tmp_path.glob("step-*"))]

    assert train(7, every=3) == [1, 3, 6]
    assert train(3, start=3) == [1, 3, 4, 5, 6]
    assert train(4, steps=2) == [1, 2]
    with pytest.raises(PrecisionError, match="steps=0"):
        halfstep.record(model, tmp_path, steps=0)


def test_a_step_of_a_deep_model_takes_at_most_a_megabyte(tmp_path):
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(250)]
    model = nn.Sequential(*layers)
    with halfstep.record(model, tmp_path, steps=1):
        model(torch.ones(64, 8)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    (path,) = tmp_path.glob("step-*")
    assert 100_000 < path.stat().st_size <= 1_000_000


def rank_of_two(rank, folder, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    model, generator = trained(), torch.Generator().manual_seed(5)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with halfstep.record(parallel, folder, optimizer):
        for _ in range(2):
            ids, targets = batch(generator)
            loss_of(parallel, ids[rank::2], targets[rank::2]).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_are_as_one_process_and_a_sum_for_their_mean_is_found(runs, tmp_path):
    folder, address = tmp_path / "two", f"file://{tmp_path}/store"
    torch.multiprocessing.spawn(rank_of_two, (folder, address), nprocs=2)
    for amp in (None, BF16):
        assert not halfstep.compare(runs(amp=amp), folder).found
    found = halfstep.compare(runs("halved", after=at(0, halve)), folder)
    assert found.cause == "reduction"
    assert "2 times" in found.evidence


# --- bad input


def refused(capsys, *words):
    assert main(["compare", *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "unexpected" not in error
    return error


def test_what_is_no_record_is_refused_in_a_line(runs, tmp_path, capsys):
    good = runs()
    assert "holds no record" in refused(capsys, good, tmp_path / "none")
    assert "holds no record" in refused(capsys, tmp_path, good)
    other, later = tmp_path / "other", tmp_path / "later"
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    for folder, start in ((other, 0), (later, 9)):
        with halfstep.record(model, folder, start=start):
            model(torch.ones(2, 4)).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
    assert "other models: 0 of" in refused(capsys, good, other)
    assert "no step is in both" in refused(capsys, other, later)
    (other / "record.json").write_text('{"format": 2}')
    assert "of format 2" in refused(capsys, other, other)


def test_a_damaged_record_is_refused(runs, tmp_path):
    (path,) = runs("whole", steps=1).glob("step-*")
    content = path.read_bytes()
    (tmp_path / "record.json").write_text((path.parent / "record.json").read_text())
    rng = random.Random(0)
    for case in range(200):
        data = bytearray(content)
        if case % 4 == 0:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(200 if case % 4 == 1 else len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / path.name).write_bytes(data)
        with pytest.raises(DataError):
            halfstep.compare(tmp_path, path.parent)


def test_the_command_prints_the_difference_and_ends_with_1(runs, capsys):
    good, other = runs(), runs("causal", change=put("blocks.1.attn", causal=False))
    assert main(["compare", str(good), str(runs(amp=BF16))]) == 0
    assert "no difference beyond rounding" in capsys.readouterr().out
    assert main(["compare", str(good), str(other)]) == 1
    out = capsys.readouterr().out
    assert "fault mask: step 1, forward of blocks.1.attn (Attention), attention" in out
    assert "is_causal is True" in out
    assert main(["compare", str(good), str(other), "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    assert (table["command"], table["cause"], table["first"]["step"]) == ("compare", "mask", 1)
