"""torch's own sharded checkpoints of a run under Precision: any layout, policy, number of ranks.

The oracle of a load is what was saved, by ``full_tensor()``; of what follows, the run that went on.
"""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from halfstep import GradScaler, LostUpdateMeter, Precision, PrecisionError, optim
from halfstep.precision.masters.local_part import place_like

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # as of one process
]

LAYOUTS = ("replicate", "fsdp", "hsdp", "tp", "fsdp x tp")
POLICIES = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-split", "bf16-master")
ROUTES = ((2, 2), (2, 4), (4, 2), (2, 1))
EVERY = [*itertools.product(LAYOUTS, POLICIES, ROUTES, ("sync", "async"))]
QUICK = [("fsdp", "bf16-master", (2, 2), "async"), ("tp", "bf16-split", (2, 1), "sync")]


class Run:
    """A model in a layout over ``size`` ranks (None: one process alone), under a policy."""

    options = None

    def __init__(self, layout, policy, size, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 10))
        low = policy.startswith(("bf16-split", "bf16-master"))
        if low and layout not in ("", "replicate"):
            self.model.bfloat16()
        if low and layout in ("fsdp", "hsdp", "fsdp x tp"):
            policy += ",reduce=bf16"
        if size is not None:
            lay_out(self.model, layout, size)
        own = (low and "split" in policy) or "8bit" in policy
        make = optim.AdamW if own else torch.optim.AdamW
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.precision = Precision(policy, self.model, self.optimizer)

    def steps(self, first, last):
        """Of rows that all ranks share, so that any number of them does the same."""
        for step in range(first, last):
            rows = torch.randn(8, 10, generator=torch.Generator().manual_seed(step))
            with self.precision.autocast():
                loss = self.model(rows).float().square().mean()
            self.precision.step(loss)

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        numbers = {} if self.precision is None else {"precision": self.precision}
        return {"model": model, "optimizer": optimizer, **numbers}

    def load(self, where):
        state = self.state()
        dcp.load(state, checkpoint_id=where)
        model, kept, *_ = state.values()
        given = {"model_state_dict": model, "optim_state_dict": kept, "options": self.options}
        set_state_dict(self.model, self.optimizer, **given)


def lay_out(model, layout, size):
    hybrid = (2, size // 2) if layout == "hsdp" else (size // 2, 2)
    mesh = init_device_mesh("cpu", hybrid, mesh_dim_names=("a", "b"))
    if "tp" in layout:
        parallelize_module(model, mesh["b"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if layout == "replicate":
        replicate(model)
    elif layout != "tp":
        fully_shard(model, mesh=mesh if layout == "hsdp" else mesh["a"] if "x" in layout else None)


def whole(state):
    """All numbers of a state, by path, in one piece."""
    found = {}
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        value = value.state_dict() if isinstance(value, Precision) else value
        if isinstance(value, (dict, list)):
            found |= {f"{key}.{inner}": one for inner, one in whole(value).items()}
        else:
            value = value.detach() if torch.is_tensor(value) else value
            if isinstance(value, DTensor):
                value = value.full_tensor()
            found[str(key)] = copy.deepcopy(value)
    return found


def save(rank, layout, policy, size, how, where):
    run = Run(layout, policy, size)
    run.steps(0, 3)
    state = run.state()
    saved = whole(state)
    write = dcp.async_save if how == "async" else dcp.save
    written = write(state, checkpoint_id=where, process_group=dist.new_group())
    run.steps(3, 5)
    if how == "async":  # what the steps change meanwhile is not what is saved
        written.result()
    return saved, whole(run.state()["model"])


def load(rank, layout, policy, size, where):
    run = Run(layout, policy, size, seed=1)
    run.load(where)
    loaded = whole(run.state())
    run.steps(3, 5)
    return loaded, whole(run.state()["model"])


@pytest.mark.parametrize(
    ("layout", "policy", "route", "how"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY],
)
def test_a_run_goes_on_from_a_checkpoint(request, tmp_path, layout, policy, route, how):
    before, after = route
    of = {"layout": layout, "policy": policy, "where": str(tmp_path)}
    pool = request.getfixturevalue(f"pool{before}")
    saved, expected = pool.run(save, size=before, how=how, **of)[0]
    if after == 1:
        loaded, found = load(0, size=None, **of)
    else:
        loaded, found = request.getfixturevalue(f"pool{after}").run(load, size=after, **of)[0]
    assert loaded.keys() == saved.keys()
    assert [k for k, value in saved.items() if not equal(value, loaded[k])] == []
    assert any("master" in key for key in saved) == (policy == "bf16-master")
    near = 0 if before == after else 1e-5 if policy == "fp32" else 2.0**-8
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=near, atol=near)


def equal(one, *others):
    return all(torch.equal(one, x) if torch.is_tensor(one) else one == x for x in others)


def both_ways(rank, where, policy):
    """What differs of plain torch's state after it went to Precision and back, key by key."""
    plain, told = nn.Linear(16, 16), []
    fully_shard(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(3):
        plain(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for flat, make in itertools.product((False, True), (torch.optim.AdamW, optim.AdamW)):
        given = {"options": StateDictOptions(flatten_optimizer_state_dict=flat)}
        other = nn.Linear(16, 16)
        fully_shard(other)
        taking = make(other.parameters(), lr=0.5)
        first = whole(get_state_dict(plain, optimizer, **given))
        with Precision(policy, other, taking):
            pass_on(plain, optimizer, other, taking, f"{where}/there {len(told)}", given)
            moved = whole(get_state_dict(other, taking, **given))
            pass_on(other, taking, plain, optimizer, f"{where}/back {len(told)}", given)
        back = whole(get_state_dict(plain, optimizer, **given))
        told.append([k for k in first if not equal(first[k], moved[k], back[k])])
    return told


def pass_on(model, optimizer, other, taking, where, given):
    model_state, kept = get_state_dict(model, optimizer, **given)
    dcp.save({"m": model_state, "o": kept}, checkpoint_id=where)
    model_state, kept = get_state_dict(other, taking, **given)
    dcp.load({"m": model_state, "o": kept}, checkpoint_id=where)
    set_state_dict(other, taking, model_state_dict=model_state, optim_state_dict=kept, **given)


@pytest.mark.parametrize(
    "policy", ["fp32", *(pytest.param(p, marks=pytest.mark.slow) for p in POLICIES[1:3])]
)
def test_a_checkpoint_of_plain_torch_loads_and_goes_back(pool2, tmp_path, policy):
    for told in pool2.run(both_ways, where=str(tmp_path), policy=policy):
        assert told == [[]] * 4


def eight_bits(rank, where, size, again):
    """What 8-bit moments are after a checkpoint, and what a run that goes on makes of them."""
    run = Run("fsdp", "bf16-mixed,moments=8bit", size, seed=int(again))
    if again:
        run.load(where)
    else:
        run.steps(0, 3)
        dcp.save(run.state(), checkpoint_id=where)
    loaded = whole(run.state()["optimizer"])
    run.steps(3, 5)
    return loaded, whole(run.state())


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_8_bit_moments_are_cut_anew(request, tmp_path, size):
    pool, where = request.getfixturevalue(f"pool{size}"), str(tmp_path)
    saved, expected = request.getfixturevalue("pool2").run(
        eight_bits, where=where, size=2, again=False
    )[0]
    loaded, found = pool.run(eight_bits, where=where, size=size, again=True)[0]
    assert all(equal(value, loaded[key]) for key, value in saved.items())
    if size == 2:
        assert all(equal(value, found[key]) for key, value in expected.items())


class Alone(Run):
    """An optimizer of halfstep's over 16-bit weights, in a loop without a Precision."""

    options = StateDictOptions(full_state_dict=True)  # as the Trainer of transformers saves

    def __init__(self, make, options, shards=True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(10, 13), nn.Tanh(), nn.Linear(13, 10)).bfloat16()
        if shards:
            fully_shard(self.model)
        held = optim.muon_groups(self.model) if make is optim.Muon else self.model.parameters()
        self.optimizer, self.precision = make(held, lr=0.01, **options), None
        self.meter = LostUpdateMeter(self.optimizer, every=1)  # reads what a state dict has shown

    def steps(self, first, last):
        for step in range(first, last):
            rows = torch.randn(8, 10, generator=torch.Generator().manual_seed(step))
            self.model(rows.bfloat16()).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def alone(rank, where, make, options):
    """The state saved, that of a new run that loads it, and both and one process's two steps on."""
    one, run, resumed = Alone(make, options, False), Alone(make, options), Alone(make, options)
    one.steps(0, 5)
    run.steps(0, 3)
    dcp.save(run.state(), checkpoint_id=where)
    resumed.load(where)
    states = [whole(each.state()["optimizer"]["state"]) for each in (run, resumed)]
    run.steps(3, 5)
    resumed.steps(3, 5)
    exact = [
        [whole({0: place_like(o.read_master(p), p)})["0"] for p in each.model.parameters()]
        for each in (one, run, resumed)
        for o in [each.optimizer]
    ]
    return states, exact


@pytest.mark.parametrize("make", [optim.AdamW, optim.Muon])
@pytest.mark.parametrize("options", [{"update": "split"}, {"update": "kahan", "moments": "8bit"}])
def test_an_optimizer_alone_steps_on_parts_and_shows_dtensors(pool2, tmp_path, make, options):
    given = {"where": str(tmp_path), "make": make, "options": options}
    (saved, loaded), (one, run, resumed) = pool2.run(alone, **given)[0]
    assert [k for k, value in saved.items() if not equal(value, loaded[k])] == []
    for expected, value, again in zip(one, run, resumed, strict=True):
        assert torch.equal(value, again)
        if "moments" not in options:  # a block of 8-bit moments ends with a rank's part
            assert torch.equal(value, expected)


class Unknown(torch.optim.Optimizer):
    """Of a user's."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})


def refusals(rank):
    said = {}
    for make in (torch.optim.Muon, torch.optim.Adafactor, Unknown, torch.optim.SGD, optim.Muon):
        model = nn.Linear(8, 8, bias=False)
        fully_shard(model)
        optimizer = make(model.parameters(), lr=0.01)
        try:
            Precision("fp32", model, optimizer).close()
        except PrecisionError as error:
            said[make.__name__] = str(error)
            optimizer.elementwise = True
            Precision("fp32", model, optimizer).close()
    return said


def test_optimizers_of_whole_tensors_are_refused_parts(pool2):
    for said in pool2.run(refusals):
        assert [*said] == ["Muon", "Adafactor", "Unknown"]
        assert "halfstep.optim.Muon" in said["Muon"]
        assert "elementwise = True" in said["Unknown"]


def test_numbers_of_a_run_are_stateful(tmp_path):
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    run = Run("", "fp16-mixed", None)
    run.steps(0, 2)
    kept = run.precision.state_dict()
    for state in (scaler, run.precision):
        assert isinstance(state, Stateful)
        dcp.save({"s": state}, checkpoint_id=tmp_path / type(state).__name__)
    other, fresh = Run("", "fp16-mixed", None), GradScaler("cpu", init_scale=2.0)
    dcp.load({"s": other.precision}, checkpoint_id=tmp_path / "Precision")
    dcp.load({"s": fresh}, checkpoint_id=tmp_path / "GradScaler")
    assert other.precision.state_dict() == kept
    assert fresh.get_scale() == 64.0


def test_nothing_else_passes_the_door():
    run = Run("", "bf16-master", None)
    for gradient, rate in ((1.0, 0.0), (0.0, 0.1), (None, 0.0)):
        for p in run.model.parameters():
            p.grad = None if gradient is None else torch.full_like(p, gradient)
        run.optimizer.param_groups[0]["lr"] = rate
        with pytest.raises(PrecisionError, match="by hand"):
            run.optimizer.step()
    for p in run.model.parameters():
        p.grad = torch.zeros_like(p)
    before = whole(run.model.state_dict())
    run.optimizer.step()
    assert all(equal(value, before[key]) for key, value in run.model.state_dict().items())
    assert {p.dtype for p in run.optimizer.state} == {torch.bfloat16}
    assert {s["exp_avg"].dtype for s in run.optimizer.state.values()} == {torch.float32}


def test_masters_are_saved_before_the_first_step():
    one, other = (Run("", "bf16-master", None, seed=seed) for seed in (0, 1))
    other.model.load_state_dict(one.model.state_dict())
    other.optimizer.load_state_dict(one.optimizer.state_dict())
    assert not one.optimizer.state
    for (name, value), (_, found) in zip(
        one.precision.masters.items(), other.precision.masters.items(), strict=True
    ):
        assert torch.equal(value, found), name
