"""Whole runs on a tiny model: resume, guards, accumulation, skipped steps, golden losses."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
from tests.reference.adam import EPS
from tests.trainer.runs import (
    ON_CPU,
    TIMES,
    assert_same_tensors,
    metrics,
    newest,
    overflowing,
    run,
    small_config,
    start,
)

from halfstep.errors import CheckpointError, ConfigError, DataError, NonFiniteError, PrecisionError
from halfstep.precision.policy.policy import POLICIES
from halfstep.trainer.config.config import load_config, shipped_configs
from halfstep.trainer.data.config import no_progress
from halfstep.trainer.loop import train
from halfstep.trainer.run import (
    create_run,
    reopen_run,
    require_fresh,
    require_resumable,
    resume,
    run_config,
    with_run_folder,
)
from halfstep.trainer.session import open_session

# One a mechanism: a scale of losses, masters, remainders, random bits, none of them.
SHORT = ("fp16-mixed", "fp16-master", "bf16-split", "bf16-sr", "bf16-pure")
MECHANISMS = [pytest.param(p, marks=() if p in SHORT else pytest.mark.slow) for p in ON_CPU]


CASES = [*MECHANISMS, "muon bf16-split,moments=8bit", "muon fp16-mixed"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:the second moments of")
def test_resume_is_bit_for_bit(corpus, tmp_path, case):
    name, _, policy = ("adamw " + case).rpartition(" ")
    dynamic = POLICIES[policy.partition(",")[0]].loss_scale.kind == "dynamic"
    every = 1 if dynamic else 3
    config = small_config(
        corpus, policy, precision=overflowing(policy) if dynamic else policy, model__dropout=0.1,
        run__lost_update_every=every, optimizer__name=name.split()[-1],
    )  # fmt: skip
    run(config, tmp_path / "whole")
    run(config, tmp_path / "cut", until=6)  # the last checkpoint is of step 4
    session, ticks = run(config, tmp_path / "cut")
    assert ticks[0].record.step == 5
    assert session.step == 8
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    measured = [line["step"] for line in metrics(tmp_path / "cut") if "lost_updates" in line]
    applied = [line["step"] for line in metrics(tmp_path / "cut") if line["applied"]]
    assert measured == applied[every - 1 :: every]
    a, b = newest(tmp_path / "whole"), newest(tmp_path / "cut")
    assert_same_tensors(a.weights, b.weights)
    assert_same_tensors(a.optimizer, b.optimizer)
    assert a.state["precision"] == b.state["precision"]
    if dynamic:
        assert a.state["precision"]["skipped_total"] > 0


def test_the_loss_falls_and_metrics_have_the_promised_keys(corpus, tmp_path):
    config = small_config(corpus, run__max_steps=24, optimizer__learning_rate=1e-2)
    run(config, tmp_path / "r")
    lines = [json.loads(x) for x in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert lines[-1]["val_loss"] < lines[3]["val_loss"] - 0.5
    always = TIMES | {
        "step", "loss", "learning_rate", "grad_norm", "loss_scale", "applied", "skipped_total",
        "tokens",
    }  # fmt: skip
    for line in lines:
        assert set(line) - {"val_loss"} == always
        assert ("val_loss" in line) == (line["step"] % 4 == 0)
        assert line["tokens"] == line["step"] * 4 * 32
    assert {p.name for p in (tmp_path / "r").iterdir()} == {
        "config.toml", "env.json", "health.jsonl", "metrics.jsonl", "tokenizer",
        "checkpoints", "run.lock",
    }  # fmt: skip


def test_a_skipped_step_changes_nothing_and_holds_the_schedule(corpus, tmp_path):
    config = small_config(
        corpus, precision=overflowing("fp16-mixed"), run__max_steps=12, run__save_every=1,
        run__lost_update_every=1,
    )  # fmt: skip
    session, folder = start(config, tmp_path / "r")
    before = {n: p.detach().clone() for n, p in session.precision.named_parameters().items()}
    skipped = 0
    for tick in train(session, Path(folder.name).parent):
        assert (tick.record.lost_updates is not None) == tick.record.applied
        if tick.record.applied:
            break
        skipped += 1
        # inf - inf on the way can leave NaN alone in the parameters
        assert tick.record.skip_reason in ("overflow", "nan_gradients")
        assert tick.record.learning_rate == pytest.approx(config.optimizer.learning_rate / 2)
        assert not session.precision.optimizers[0].state
        assert_same_tensors(session.precision.named_parameters(), before)
    folder.close()
    assert skipped > 0
    assert session.applied == 1


def break_forward(loss_sum):
    calls = []

    def wrapped(batch):
        calls.append(0)
        total, count = loss_sum(batch)
        return (total * float("nan") if len(calls) == 6 else total), count

    return wrapped


def finish_broken(corpus, path, breaks, policy, **overrides):
    """The error that ends a run whose loss is wrapped."""
    session, folder = start(small_config(corpus, policy, **overrides), path)
    session.loss_sum = breaks(session.loss_sum)
    with pytest.raises(NonFiniteError) as error:
        list(train(session, path))
    folder.close()
    return session, error.value


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed", "bf16-split"])
def test_a_nan_in_the_forward_stops_with_the_last_checkpoint_intact(corpus, tmp_path, policy):
    sparse = {"run__save_every": 2, "run__keep": 1, "run__eval_every": 0}
    _, error = finish_broken(corpus, tmp_path / "r", break_forward, policy, **sparse)
    assert "step 6: the loss is nan" in str(error)
    assert "step-00000004" in str(error)
    assert (error.cause, error.exit_code) == ("forward", 3)
    assert newest(tmp_path / "r").state["step"] == 4
    last = metrics(tmp_path / "r")[-1]
    assert (last["step"], last["applied"], last["skip_reason"]) == (6, False, "forward")
    assert (last["loss"], last["grad_norm"]) == ("nan", "nan")
    # the loss is broken at its 6th call only, so the same batch again is finite
    assert "first cause" not in str(error)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name.startswith("gpt2-") else ())
        for name in shipped_configs()
        if load_config(name).TASK == "pretrain"
    ],
)
def test_every_shipped_configuration_trains_a_few_steps(corpus, tmp_path, name):
    """With its own settings, but for what decides size and where the data comes from."""
    own = load_config(name)
    small = own.model.n_embd <= 128
    overrides = {
        "data.train": [str(corpus)],
        "data.tokenizer": "bytes",
        "model.block_size": 32,
        "model.n_layer": own.model.n_layer if small else 2,
        "model.n_embd": own.model.n_embd if small else 4 * own.model.n_head,
        "run.batch_size": 2 * own.run.grad_accum,
        "run.max_steps": 3,
        "run.eval_batches": 1,
        "run.device": "cpu",
        "schedule.warmup_steps": 2,
    }
    _, ticks = run(load_config(name, list(overrides.items())), tmp_path / "r")
    assert [tick.record.applied for tick in ticks] == [True] * 3
    assert newest(tmp_path / "r").state["step"] == 3


# Losses of four steps. Made on x86-64 with AVX512-BF16 and AMX; a CPU without rounds elsewhere (its
# attention, simulated, keeps the probabilities), which the bounds cover.
GOLDEN = {
    "fp32": [5.544681, 5.537036, 5.489968, 5.451454],
    "bf16-mixed": [5.544712, 5.537050, 5.490026, 5.451458],
    "fp16-mixed": [5.544681, 5.537030, 5.489966, 5.451463],
    "bf16-master": [5.544751, 5.537085, 5.490070, 5.451531],
}
# Of the first step's forward, through the fp32 kernels that simulate 16-bit products on any CPU.
SIMULATED = {"bf16-mixed": 5.544675, "fp16-mixed": 5.544681, "bf16-master": 5.544721}


def golden_run(corpus, path, policy, steps):
    """Losses of a run whose weights do not follow the noise of gradients: see EPS."""
    config = small_config(
        corpus, policy, run__max_steps=steps, optimizer__eps=EPS,
        schedule__warmup_steps=min(2, steps),
    )  # fmt: skip
    run(config, path)
    return [m["loss"] for m in metrics(path)]


@pytest.mark.parametrize("policy", GOLDEN)
def test_golden_losses(corpus, tmp_path, policy):
    """A change that is not numerical leaves these alone: law 11.

    Other processors and versions of torch add in another order. That moves the last bits of fp32
    and flips roundings to 16 bits, and where those of one step differ, all later ones are drawn
    anew. What a run's roundings are worth is its distance from fp32, which this table tells; two
    runs with independent roundings are sqrt(2) times that apart, and 3 times as much is an outlier
    of one in a thousand among normal numbers.
    """
    off = [a - b for a, b in zip(GOLDEN[policy], GOLDEN["fp32"], strict=True)]
    worth = math.sqrt(sum(x * x for x in off) / len(off))
    ulps = 4 * 2.0**-21  # a number from 4 to 8 has a gap of 2^-21; and six digits above
    found = golden_run(corpus, tmp_path / "r", policy, 4)
    assert found == pytest.approx(GOLDEN[policy], rel=0, abs=ulps + 3 * math.sqrt(2) * worth)


@pytest.mark.parametrize("policy", SIMULATED)
def test_golden_first_losses_of_simulated_products(corpus, tmp_path, policy, monkeypatch):
    """Sums of rounded operands differ among CPUs in fp32's last bits alone.

    Such a bit flips the rounding to 16 bits of one in thousands of sums, and each is worth less
    than 2^-8 of a logit of about 0.1 of one of 128 targets: 3e-6.
    """
    monkeypatch.setattr("halfstep.precision.casting.autocast.cpu_has_bf16", lambda: False)
    (found,) = golden_run(corpus, tmp_path / "r", policy, 1)
    assert found == pytest.approx(SIMULATED[policy], rel=0, abs=4 * 2.0**-21 + 3e-6)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """The session, checkpoint and folder of a run that has ended."""
    path = tmp_path_factory.mktemp("finished") / "r"
    session, _ = run(small_config(corpus), path)
    return session, newest(path), path


def test_a_run_folder_is_not_overwritten_or_shared(corpus, tmp_path, finished):
    session, _, path = finished
    with pytest.raises(ConfigError, match="holds a run already"):
        require_fresh(path)
    folder = reopen_run(path)
    with pytest.raises(ConfigError, match="written by another process"):
        reopen_run(path)
    folder.close()
    reopen_run(path).close()
    with pytest.raises(ConfigError, match="holds no run"):
        reopen_run(tmp_path)
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        require_fresh(tmp_path)
    # what a killed start has left is taken up
    left = tmp_path / "r"
    (left / "tokenizer").mkdir(parents=True)
    (left / "env.json").write_text("{")
    (left / "run.lock").write_text("pid 1")
    require_fresh(left)
    create_run(left, session).close()
    assert load_config(str(left / "config.toml")) == session.config


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.n_layer", 2), ("data.tokenizer", "bpe:300"), ("precision", "fp32"), ("run.seed", 1),
     ("optimizer.learning_rate", 3.0)],
)  # fmt: skip
def test_resume_refuses_another_model_tokenizer_or_precision(corpus, finished, key, value):
    _, _, path = finished
    config, other = small_config(corpus), small_config(corpus, **{key: value})
    with pytest.raises(ConfigError, match=f"cannot change {key.removeprefix('run.')}="):
        require_resumable(config, other)
    if key in ("model.n_layer", "data.tokenizer"):
        stranger = open_session(with_run_folder(other, path), no_progress)
        with pytest.raises(CheckpointError, match=r"made (by|with) another (model|tokenizer)"):
            resume(stranger, path / "checkpoints")


def test_a_runs_own_file_may_hold_keys_of_another_version_and_a_users_may_not(tmp_path, finished):
    finished = finished[2]
    folder = shutil.copytree(finished, tmp_path / "run")
    file = folder / "config.toml"
    text = file.read_text().replace("[run]", "[run]\nrelease_what = true", 1)
    file.write_text(text + "\n[gone]\nkey = 1\n")
    assert run_config(folder) == run_config(finished)
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(str(file))


def test_resume_refuses_data_that_has_changed(corpus, tmp_path):
    data = tmp_path / "data.txt"
    data.write_text(corpus.read_text())
    config = small_config(data, run__max_steps=2)
    run(config, tmp_path / "r")
    data.write_text(corpus.read_text() + "one more line\n")
    with pytest.raises(CheckpointError, match="another training data, or it has changed"):
        run(config, tmp_path / "r")


def test_data_shorter_than_a_block_is_refused_before_a_folder_exists(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(DataError, match=r"data \(.*short\.txt\) is too short: \d tokens"):
        start(small_config(short), tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.filterwarnings("ignore:the second moments of parameter 8")
def test_a_resume_may_change_the_precision_where_it_is_asked_for(corpus, tmp_path):
    first = small_config(corpus, "bf16-split,moments=8bit", run__max_steps=4)
    session, _ = run(first, tmp_path / "r")
    exact = {n: v.clone() for n, v in session.precision.masters.items()}
    for policy in ("fp32", "bf16-mixed", "bf16-master", "bf16-split", "bf16-sr", "fp16-master"):
        later = small_config(corpus, policy, run__max_steps=12)
        other = open_session(with_run_folder(later, tmp_path / "r"), no_progress)
        other.restore(newest(tmp_path / "r"), tmp_path)
        assert other.step == 4
        if policy != "bf16-sr":
            assert_same_tensors(dict(other.precision.masters.items()), exact)
        batch, _ = other.micro_batches()
        with other.precision.autocast():
            total, count = other.loss_sum(batch[0])
        assert other.precision.step(total / count).loss < 6


def test_a_checkpoint_copied_to_a_later_step_is_not_resumed_from(corpus, tmp_path, finished):
    checkpoints = shutil.copytree(finished[2] / "checkpoints", tmp_path / "checkpoints")
    copy = shutil.copytree(checkpoints / "step-00000004", checkpoints / "step-00000012")
    (checkpoints / "step-00000020").mkdir()  # no checkpoint, so not the newest
    session = open_session(with_run_folder(small_config(corpus), tmp_path), no_progress)
    with pytest.raises(CheckpointError, match=r"step-00000012 holds step 4"):
        resume(session, checkpoints)
    shutil.rmtree(copy)
    assert resume(session, checkpoints).name == "step-00000008"


ODD = "step-00000008: its state is damaged or foreign"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step", "x", ODD),
        ("precision", ..., ODD),
        ("precision", {"policy": "bf16-mixed"}, "precision state has keys"),
        ("precision.loss_scale", {"scale": "x"}, "scale"),
        ("best", {"step": 4, "score": 1.0, "evaluation": {}}, ODD),
        ("made_with", ..., ODD),
    ],
)
def test_a_state_that_is_none_is_refused(finished, key, value, message):
    session, checkpoint, _ = finished
    state = json.loads(json.dumps(checkpoint.state))
    *above, last = key.split(".")
    level = state[above[0]] if above else state
    if value is ...:
        del level[last]
    else:
        level[last] = value
    where = Path("checkpoints") / "step-00000008"
    with pytest.raises((CheckpointError, PrecisionError), match=message):
        session.restore(dataclasses.replace(checkpoint, state=state), where)
    session.restore(checkpoint, where)
    assert session.step == 8
