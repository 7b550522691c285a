"""What a run's step holds: estimated before it, measured in it, and refused where it cannot fit."""

import json
import re
import sys

import pytest
import torch
from torch import nn

import halfstep
from halfstep.diagnostics.memory import PARTS, MemoryMeter, memory_from_json
from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError
from halfstep.optim.state import REMAINDER
from halfstep.precision.policy.devices import cpu_has_bf16
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.run import OptimizerConfig
from halfstep.trainer.data.token_file import no_progress
from halfstep.trainer.estimate import estimate_config, estimate_count, require_memory
from halfstep.trainer.loop import attempt
from halfstep.trainer.memory import count_peak_from_here, peak_memory_bytes
from halfstep.trainer.optimizer import averages
from halfstep.trainer.session import open_session
from trainer import lm_folders
from trainer.classifiers import classify_config, write_bert, write_files
from trainer.runs import small_config

POLICIES_HERE = ("fp32", "bf16-mixed", "bf16-split,moments=8bit")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 800)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory, corpus):
    """A configuration of each kind by policy; of texts of several lengths, where there are any."""
    folder = tmp_path_factory.mktemp("runs")
    files = write_files(folder / "texts")
    bert = write_bert(folder / "bert")
    base = lm_folders.save_base(folder / "lm")
    lm_folders.write(folder / "train.jsonl", lm_folders.alpaca(48))
    lm_folders.write(folder / "dev.jsonl", lm_folders.alpaca(9, seed=1))

    def text(policy, **changes):
        return small_config(corpus, policy, **changes)

    def lm(policy, **changes):
        values = {
            "precision": policy,
            "model.source": str(base),
            "data.train": [str(folder / "train.jsonl")],
            "data.dev": [str(folder / "dev.jsonl")],
            "data.max_length": lm_folders.POSITIONS,
            "run.max_steps": 2,
            "run.batch_size": 6,
            "run.device": "cpu",
            **changes,
        }
        return load_config("lm-lora", [*values.items()])

    wide = {"model__n_embd": 256, "model__n_layer": 2, "model__n_head": 4, "run__batch_size": 8}
    return {
        "gpt": lambda policy: text(policy, **wide),
        "checkpointed gpt": lambda p: text(p, **wide, model__activation_checkpointing=True),
        "gpt in micro-batches": lambda p: text(p, **wide, run__grad_accum=2),
        "scratch": lambda policy: classify_config(files, precision=policy),
        "bert": lambda p: classify_config(
            files, shipped="classify-pretrained", precision=p, model__source=str(bert)
        ),
        "lora": lm,
        "packed lora": lambda policy: lm(policy, **{"data.packing": True}),
        "whole lm": lambda policy: lm(policy, **{"model.lora_r": 0}),
    }


KINDS = ("gpt", "checkpointed gpt", "gpt in micro-batches", "scratch", "bert", "lora", "whole lm",
         "packed lora")  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "policy"),
    # a frozen base in fp32 refuses 16-bit weights
    [(k, p) for k in KINDS for p in POLICIES_HERE if not ("lora" in k and "split" in p)],
)
def test_a_run_knows_what_its_step_holds(kind, policy, made, monkeypatch, torch_alone):
    session = open_session(made[kind](policy), no_progress)
    batches, _ = session.micro_batches()
    with MemoryMeter(session.precision, batches[0]) as meter:
        attempt(session)
    guess, found = session.memory, meter.memory
    assert memory_from_json(json.loads(json.dumps(guess.to_json()))) == guess
    for part in ("weights", "masters", "gradients", "moments"):
        assert guess.part(part) == found.part(part), part
    if "lm" in kind or "lora" in kind:  # its loss picks positions by value: no shapes of them
        assert guess.rows == 0
    else:
        for part in PARTS:
            near = 0.05 * found.total
            assert guess.part(part) == pytest.approx(found.part(part), abs=near), part

    # what is kept between steps fits, or the run is refused
    kept = guess.total - guess.saved - guess.part("batch")
    monkeypatch.setattr("halfstep.trainer.estimate.memory_bytes", lambda _: kept)
    open_session(made[kind](policy), no_progress)
    monkeypatch.setattr("halfstep.trainer.estimate.memory_bytes", lambda _: kept - 1)
    with pytest.raises(ConfigError, match="the run keeps at least"):
        open_session(made[kind](policy), no_progress)


def refusal(config, monkeypatch, have):
    monkeypatch.setattr("halfstep.trainer.estimate.memory_bytes", lambda _: have)
    with pytest.raises(ConfigError) as caught:
        open_session(config, no_progress)
    return str(caught.value)


def test_what_would_fit_does_fit(corpus, monkeypatch):
    """Each piece of advice, taken, is a run that is not refused."""
    state = {"model__n_embd": 256, "model__n_layer": 2, "model__block_size": 8}
    config = small_config(corpus, "bf16-mixed", **state)
    memory = open_session(config, no_progress).memory
    kept = memory.total - memory.saved - memory.part("batch")
    said = refusal(config, monkeypatch, int(0.75 * kept))
    for part in ("weights", "gradients", "moments"):
        assert re.search(rf"{part} \d+(\.\d+)? MB", said), said
    assert "cpu has" in said
    if cpu_has_bf16():  # a policy that is simulated is no advice
        option = re.search(r"Try --precision (\S+), or a smaller", said)[1]
        open_session(small_config(corpus, option, **state), no_progress)
    else:
        assert "Try --parallel shard=2 on 2 devices" in said
    said = refusal(config, monkeypatch, int(0.26 * kept))
    assert "Try --parallel shard=4 on 4 devices" in said


class Counting(nn.Module):
    """A module of the user's own, which remembers what it was called with."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(64, 64), []

    def forward(self, x):
        self.seen.append(x)
        return self.layer(x)


def trainer(tmp_path, model, **settings):
    data = [(torch.randn(64), torch.randn(64)) for _ in range(16)]
    return halfstep.Trainer(
        model, data, lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]), quiet=True, max_steps=2,
        batch_size=8, device="cpu", output_dir=str(tmp_path / "r"), precision="fp32", **settings,
    )  # fmt: skip


def test_a_module_of_the_users_own_is_called_in_steps_alone(tmp_path, monkeypatch):
    model = Counting()
    trainer(tmp_path, model).train()
    assert len(model.seen) == 2
    assert all(type(x) is torch.Tensor for x in model.seen)
    written = json.loads((tmp_path / "r" / "memory.json").read_text())
    assert written["bytes"]["moments"] == {"fp32": 2 * 4 * (64 * 64 + 64)}
    assert written["rows"] == 0
    monkeypatch.setattr("halfstep.trainer.estimate.memory_bytes", lambda _: 4 * 4 * 64 * 64)
    leaner = "precision='bf16-split" if cpu_has_bf16() else "parallel='shard=2' on 2 devices"
    with pytest.raises(ConfigError, match=f"Try {leaner}"):
        trainer(tmp_path / "small", Counting()).train()
    # an optimizer of the user's own may keep nothing
    own = trainer(tmp_path / "own", Counting(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    own.train()


@pytest.mark.parametrize(
    ("name", "kept"),
    [("adamw", 2), ("sgd", 1), ("lion", 1), ("rmsprop", 2),
     ("muon", {"weight": 1, "bias": 2})],
)  # fmt: skip
def test_the_averages_that_an_optimizer_keeps(name, kept):
    found = averages(OptimizerConfig(name=name), nn.Linear(64, 64))
    assert found == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("muon", policy) for policy in ("bf16-mixed", "bf16-mixed,moments=8bit", "bf16-master",
                                          "bf16-split24,moments=8bit", "bf16-split,moments=bf16")),
        ("adamw", "bf16-split,moments=8bit"),
    ],
)  # fmt: skip
def test_moments_are_estimated_to_the_byte(corpus, name, policy):
    """Of matrices, embeddings and vectors, whose last blocks of 8 bits are not full."""
    session = open_session(small_config(corpus, policy, optimizer__name=name), no_progress)
    attempt(session)
    (optimizer,) = session.precision.optimizers
    held = [value.nbytes for state in optimizer.state.values()
            for key, value in state.items() if key not in ("step", REMAINDER)]  # fmt: skip
    assert session.memory.part("moments") == sum(held)
    forms = {"8bit": "8bit", "bf16": "bf16"}.get(policy.partition("moments=")[2], "fp32")
    assert set(session.memory.bytes["moments"]) == {forms}


def test_a_recipe_changes_nothing_of_what_a_number_of_parameters_takes():
    names = ("bf16-mixed", "nvfp4,simulate=yes", "bf16-mixed,recipe=mxfp8/bf16/bf16")
    policies = [parse_policy(name) for name in names]
    found = estimate_count(1000, policies, Layout())
    assert [memory.bytes for memory in found] == [found[0].bytes] * 3
    assert [memory.policy for memory in found] == [str(policy) for policy in policies]


def test_no_random_number_is_drawn_and_no_model_touched(corpus):
    config = small_config(
        corpus, "bf16-mixed", model__dropout=0.1, model__activation_checkpointing=True
    )
    task = open_session(config, no_progress).task
    before = {n: (p, p.detach().clone()) for n, p in task.model.named_parameters()}
    attributes = {n: set(m.__dict__) for n, m in task.model.named_modules()}
    state = torch.get_rng_state()
    found = require_memory(task, torch.device("cpu"), Layout())
    assert found.part("activations") > 0
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in task.model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert {n: set(m.__dict__) for n, m in task.model.named_modules()} == attributes


def test_each_rank_of_a_layout():
    def of(layout):
        policies = [POLICIES["bf16-mixed"]]
        (found,) = estimate_config("gpt-small-cpu", policies, 8, Layout.parse(layout))
        return found

    one, data, shard = map(of, ("", "data=2", "shard=2"))
    assert (one.ranks, data.ranks) == (1, 2)
    assert data.bytes == one.bytes  # but for sums on their way
    for part in ("weights", "gradients", "moments"):
        assert shard.part(part) == pytest.approx(one.part(part) / 2, rel=1e-4)
    assert shard.saved == one.saved


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is that of the process")
def test_the_peak_begins_anew():
    """What was freed before is not in it; the tenths are for what else the process does."""
    large = 200_000_000
    count_peak_from_here()
    begin = peak_memory_bytes(torch.device("cpu"))
    torch.ones(large, dtype=torch.uint8)
    assert peak_memory_bytes(torch.device("cpu")) > begin + 0.9 * large
    count_peak_from_here()
    assert peak_memory_bytes(torch.device("cpu")) < begin + 0.1 * large
