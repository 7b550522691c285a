"""Whole runs on a tiny model: resume, guards, accumulation, skipped steps, golden losses."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from tests.reference.adam import EPS

from halfstep.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    PrecisionError,
)
from halfstep.precision.policy.policy import POLICIES
from halfstep.trainer.checkpoint.store import list_checkpoints, load_checkpoint
from halfstep.trainer.config.config import load_config, shipped_configs
from halfstep.trainer.data.progress import no_progress
from halfstep.trainer.data.tokenizer import ByteTokenizer
from halfstep.trainer.loop import train
from halfstep.trainer.models.gpt.gpt import GPT
from halfstep.trainer.models.gpt.hf import save_gpt2
from halfstep.trainer.run.folder import create_run, reopen_run, require_fresh
from halfstep.trainer.run.resume import require_resumable, resume, with_run_folder
from halfstep.trainer.session import open_session
from halfstep.trainer.tasks.text_model import load_trained

ON_CPU = [name for name in POLICIES if name not in ("tf32", "bf16-module")]  # GPUs, FSDP2 only
# One a mechanism: casts with and without a scale, masters, remainders, random bits, none of them.
SHORT = ("fp32", "bf16-mixed", "fp16-mixed", "fp16-master", "bf16-split", "bf16-sr", "bf16-pure")


def small_config(corpus, policy="bf16-mixed", **overrides):
    values = {
        "precision": policy,
        "data.train": [str(corpus)],
        "data.tokenizer": "bytes",
        "model.n_layer": 1,
        "model.n_head": 2,
        "model.n_embd": 32,
        "model.block_size": 32,
        "run.max_steps": 8,
        "run.batch_size": 4,
        "run.eval_every": 4,
        "run.eval_batches": 2,
        "run.save_every": 4,
        "run.keep": 9,
        "run.device": "cpu",
        "schedule.warmup_steps": 2,
    }
    if policy == "fp16-pure":
        values["optimizer.eps"] = 1e-4  # 1e-8 is 0 in fp16
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config("gpt-tiny", list(values.items()))


def start(config, path):
    session = open_session(with_run_folder(config, path), no_progress)
    return session, create_run(path, session)


def finish(session, folder):
    ticks = list(train(session, folder.path))
    folder.close()
    return ticks


def metrics(path, without=("tokens_per_second", "flops_per_second", "gemm_share",
                           "peak_memory_bytes")):  # fmt: skip
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in without} for line in lines]


def newest(path):
    return load_checkpoint(list_checkpoints(path / "checkpoints")[-1])


def assert_same_tensors(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    "policy", [pytest.param(p, marks=() if p in SHORT else pytest.mark.slow) for p in ON_CPU]
)
def test_resume_is_bit_for_bit(corpus, tmp_path, policy):
    # A scale that overflows at first and grows soon: its counters must survive as well.
    if POLICIES[policy].loss_scale.kind == "dynamic":
        fields = str(POLICIES[policy]).replace(policy, SPELLED[policy])
        policy_text = f"{fields},scale=dynamic,init_scale=16777216,growth_interval=3"
    else:
        policy_text = policy
    config = small_config(corpus, policy, precision=policy_text, model__dropout=0.1)

    session, folder = start(config, tmp_path / "whole")
    finish(session, folder)

    session, folder = start(config, tmp_path / "cut")
    for tick in train(session, folder.path):
        if tick.record.step == 6:  # the last checkpoint is of step 4
            break
    folder.close()
    del session
    session = open_session(with_run_folder(config, tmp_path / "cut"), no_progress)
    folder = reopen_run(tmp_path / "cut")
    assert resume(session, folder.path / "checkpoints").name == "step-00000004"
    assert session.step == 4
    finish(session, folder)

    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    a, b = newest(tmp_path / "whole"), newest(tmp_path / "cut")
    assert_same_tensors(a.weights, b.weights)
    assert_same_tensors(a.optimizer, b.optimizer)
    assert a.state["precision"] == b.state["precision"]
    if POLICIES[policy].loss_scale.kind == "dynamic":
        assert a.state["precision"]["skipped_total"] > 0


SPELLED = {
    "fp16-mixed": "params=fp32,compute=fp16",
    "fp16-master": "params=fp16",
    "fp16-pure": "params=fp16,master=fp16",
}


def test_micro_batches_equal_one_batch(corpus, tmp_path):
    losses = {}
    for accum in (1, 4):
        config = small_config(corpus, "fp32", run__grad_accum=accum)
        session, folder = start(config, tmp_path / str(accum))
        finish(session, folder)
        losses[accum] = [m["loss"] for m in metrics(tmp_path / str(accum))]
    # fp32 sums in another order: a few ulp (6e-8 each) of a loss near 5, grown over 8 updates
    assert losses[4] == pytest.approx(losses[1], rel=2e-5)
    assert losses[4] != losses[1] or len(set(losses[1])) == 8


def test_the_loss_falls_and_metrics_have_the_promised_keys(corpus, tmp_path):
    config = small_config(corpus, run__max_steps=40, optimizer__learning_rate=1e-2)
    session, folder = start(config, tmp_path / "r")
    ticks = finish(session, folder)
    lines = [json.loads(x) for x in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[-1]["val_loss"] < lines[3]["val_loss"] - 0.5
    allowed = {
        "step", "loss", "val_loss", "learning_rate", "grad_norm", "loss_scale", "applied",
        "skip_reason", "skipped_total", "tokens", "tokens_per_second", "flops_per_second",
        "gemm_share", "peak_memory_bytes",
    }  # fmt: skip
    for line in lines:
        assert set(line) <= allowed
        assert set(line) >= allowed - {"val_loss", "skip_reason"}
        assert ("val_loss" in line) == (line["step"] % 4 == 0)
        assert line["tokens"] == line["step"] * 4 * 32
    assert ticks[-1].seconds_left == 0
    assert {p.name for p in (tmp_path / "r").iterdir()} == {
        "config.toml", "env.json", "metrics.jsonl", "tokenizer", "checkpoints", "run.lock",
    }  # fmt: skip


def test_a_skipped_step_changes_nothing_and_holds_the_schedule(corpus, tmp_path):
    config = small_config(
        corpus, "fp16-mixed",
        precision="compute=fp16,scale=dynamic,init_scale=16777216",
        run__max_steps=12, run__save_every=1,
    )  # fmt: skip
    session, folder = start(config, tmp_path / "r")
    before = {n: p.detach().clone() for n, p in session.precision.named_parameters().items()}
    skipped = 0
    for tick in train(session, folder.path):
        if not tick.record.applied:
            skipped += 1
            # inf - inf on the way can leave NaN alone in the parameters
            assert tick.record.skip_reason in ("overflow", "nan_gradients")
            assert tick.record.learning_rate == pytest.approx(config.optimizer.learning_rate / 2)
            assert not session.precision.optimizers[0].state
            for name, parameter in session.precision.named_parameters().items():
                assert torch.equal(parameter, before[name])
        else:
            break
    folder.close()
    assert skipped > 0
    assert session.applied == 1


class Broken(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def break_forward(loss_sum):
    calls = []

    def wrapped(batch):
        calls.append(0)
        total, count = loss_sum(batch)
        return (total * float("nan") if len(calls) == 6 else total), count

    return wrapped


def break_backward(loss_sum):
    def wrapped(batch):
        total, count = loss_sum(batch)
        return Broken.apply(total), count

    return wrapped


@pytest.mark.parametrize("policy", ON_CPU)
def test_a_nan_in_the_forward_stops_with_the_last_checkpoint_intact(corpus, tmp_path, policy):
    config = small_config(corpus, policy, run__save_every=2, run__keep=1, run__eval_every=0)
    session, folder = start(config, tmp_path / "r")
    session.loss_sum = break_forward(session.loss_sum)
    with pytest.raises(NonFiniteError, match=r"step 6: the loss is nan.*step-00000004") as error:
        finish(session, folder)
    folder.close()
    assert error.value.cause == "forward"
    assert error.value.exit_code == 3
    assert newest(tmp_path / "r").state["step"] == 4
    assert metrics(tmp_path / "r")[-1] == {"step": 6, "applied": False, "skip_reason": "forward"}


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-master"])
def test_nan_gradients_under_a_finite_loss_stop_and_name_parameters(corpus, tmp_path, policy):
    session, folder = start(small_config(corpus, policy), tmp_path / "r")
    session.loss_sum = break_backward(session.loss_sum)
    with pytest.raises(NonFiniteError, match="NaN in the gradients of") as error:
        finish(session, folder)
    folder.close()
    assert error.value.cause == "gradients"
    assert len(error.value.parameters) == len(session.precision.named_parameters())


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
    config = load_config(name, list(overrides.items()))
    session, folder = start(config, tmp_path / "r")
    ticks = finish(session, folder)
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
    session, folder = start(
        small_config(
            corpus, policy, run__max_steps=steps, optimizer__eps=EPS,
            schedule__warmup_steps=min(2, steps),
        ),
        path,
    )  # fmt: skip
    finish(session, folder)
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


def test_a_run_folder_is_not_overwritten_or_shared(corpus, tmp_path):
    path = tmp_path / "r"
    session, folder = start(small_config(corpus), path)
    with pytest.raises(ConfigError, match="holds a run already"):
        require_fresh(path)
    with pytest.raises(ConfigError, match="written by another process"):
        reopen_run(path)
    finish(session, folder)
    reopen_run(path).close()
    with pytest.raises(ConfigError, match="holds no run"):
        reopen_run(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        require_fresh(tmp_path / "full")


def test_resume_refuses_another_model_tokenizer_or_precision(corpus, tmp_path):
    config = small_config(corpus)
    session, folder = start(config, tmp_path / "r")
    finish(session, folder)
    for change in (
        {"model.n_layer": 2},
        {"data.tokenizer": "bpe:300"},
        {"precision": "fp32"},
        {"run.seed": 1},
        {"optimizer.learning_rate": 3.0},
    ):
        (key,) = change
        other = small_config(corpus, **{key.replace(".", "__"): change[key]})
        named = key.removeprefix("run.")
        with pytest.raises(ConfigError, match=f"cannot change {named}="):
            require_resumable(config, other)
        if key in ("model.n_layer", "data.tokenizer"):
            stranger = open_session(with_run_folder(other, tmp_path / "r"), no_progress)
            with pytest.raises((CheckpointError, ValueError)):
                stranger.restore(newest(tmp_path / "r"), tmp_path)
    require_resumable(config, small_config(corpus, run__max_steps=99, run__keep=1))
    require_resumable(config, small_config(corpus, precision="fp32"), other_precision=True)


def test_resume_refuses_data_that_has_changed(corpus, tmp_path):
    data = tmp_path / "data.txt"
    data.write_text(corpus.read_text())
    config = small_config(data)
    session, folder = start(config, tmp_path / "r")
    finish(session, folder)
    data.write_text(corpus.read_text() + "one more line\n")
    later = open_session(with_run_folder(config, tmp_path / "r"), no_progress, resuming=True)
    with pytest.raises(CheckpointError, match="another training data, or it has changed"):
        later.restore(newest(tmp_path / "r"), tmp_path)
    assert later.step == 0


def test_a_folder_left_by_a_killed_start_is_taken_up(corpus, tmp_path):
    path = tmp_path / "r"
    (path / "tokenizer").mkdir(parents=True)
    (path / "env.json").write_text("{")
    (path / "run.lock").write_text("pid 1")
    require_fresh(path)
    session, folder = start(small_config(corpus), path)
    finish(session, folder)
    assert newest(path).state["step"] == 8


def test_a_run_from_a_model_folder_goes_on_without_it(corpus, tmp_path):
    source = GPT(small_config(corpus, model__vocab_size=256).model, seed=5)
    save_gpt2(source, tmp_path / "hf")
    ByteTokenizer().save(tmp_path / "hf")
    with pytest.raises(ConfigError, match="other ids than it was trained with"):
        small_config(corpus, run__init_from=str(tmp_path / "hf"), data__tokenizer="bpe:300")
    config = small_config(
        corpus, run__init_from=str(tmp_path / "hf"), data__tokenizer=str(tmp_path / "hf"),
        model__n_embd=64,
    )  # fmt: skip
    session, folder = start(config, tmp_path / "r")
    assert session.config.model.n_embd == 32  # the folder's
    for ours, theirs in zip(session.task.model.parameters(), source.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    finish(session, folder)
    (tmp_path / "hf" / "model.safetensors").unlink()
    again = open_session(session.config, no_progress, resuming=True)
    again.restore(newest(tmp_path / "r"), tmp_path)
    assert again.step == 8


def test_data_shorter_than_a_block_is_refused_before_a_folder_exists(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(DataError):
        start(small_config(short), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_the_time_limit_ends_a_run_in_good_order(corpus, tmp_path):
    config = small_config(corpus, run__max_steps=10**6, run__max_seconds=0.5, run__eval_every=0)
    session, folder = start(config, tmp_path / "r")
    ticks = finish(session, folder)
    assert ticks[-1].stopped_by == "max_seconds"
    assert ticks[-1].evaluation is not None
    assert newest(tmp_path / "r").state["step"] == ticks[-1].record.step < 10**6


def test_a_trained_model_is_loaded_with_its_weights(corpus, tmp_path):
    session, folder = start(small_config(corpus, "bf16-master"), tmp_path / "r")
    finish(session, folder)
    model, tokenizer, config = load_trained(tmp_path / "r")
    masters = session.precision.named_parameters()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name])
    assert tokenizer.fingerprint == session.task.data.tokenizer.fingerprint
    assert config.model.vocab_size == tokenizer.vocab_size
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no run"):
        load_trained(tmp_path / "empty")


@pytest.mark.parametrize(("answer", "rolled_back"), [("skip:1", False), ("rollback:2", True)])
@pytest.mark.filterwarnings("ignore:.*on_nonfinite=:UserWarning")
def test_a_run_goes_on_after_a_nan_where_that_was_asked_for(corpus, tmp_path, answer, rolled_back):
    config = small_config(corpus, run__on_nonfinite=answer, run__max_steps=6, run__eval_every=0)
    session, folder = start(config, tmp_path / "r")
    session.loss_sum = break_forward(session.loss_sum)
    for tick in train(session, folder.path):
        if tick.record.step == 6:
            break
        if tick.record.step == 4:
            before = {n: v.clone() for n, v in session.precision.masters.items()}
    folder.close()
    lines = metrics(tmp_path / "r")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert (lines[5]["applied"], lines[5]["skip_reason"]) == (False, "nonfinite_loss")
    assert session.precision.skipped_total == 1
    if rolled_back:  # step 5 was undone: the copy is of step 4
        for name, value in session.precision.masters.items():
            assert torch.equal(value, before[name])


# The true gradient of attention's key bias is 0: noise beside the query bias, in one block here.
@pytest.mark.filterwarnings("ignore:the second moments of parameter 8")
def test_a_resume_may_change_the_precision_where_it_is_asked_for(corpus, tmp_path):
    first = small_config(corpus, "bf16-split,moments=8bit")
    session, folder = start(first, tmp_path / "r")
    finish(session, folder)
    exact = {n: v.clone() for n, v in session.precision.masters.items()}
    for policy in ("fp32", "bf16-mixed", "bf16-master", "bf16-split", "bf16-sr", "fp16-master"):
        later = small_config(corpus, policy, run__max_steps=12)
        other = open_session(with_run_folder(later, tmp_path / "r"), no_progress, resuming=True)
        other.restore(newest(tmp_path / "r"), tmp_path)
        assert other.step == 8
        if policy != "bf16-sr":
            for name, value in other.precision.masters.items():
                assert torch.equal(value, exact[name]), (policy, name)
        batch, _ = other.micro_batches()
        with other.precision.autocast():
            total, count = other.loss_sum(batch[0])
        assert other.precision.step(total / count).loss < 6


def test_a_checkpoint_copied_to_a_later_step_is_not_resumed_from(corpus, tmp_path):
    config = small_config(corpus)
    session, folder = start(config, tmp_path / "r")
    finish(session, folder)
    checkpoints = tmp_path / "r" / "checkpoints"
    copy = shutil.copytree(checkpoints / "step-00000004", checkpoints / "step-00000012")
    (checkpoints / "step-00000020").mkdir()  # no checkpoint, so not the newest
    session = open_session(with_run_folder(config, tmp_path / "r"), no_progress)
    with pytest.raises(CheckpointError, match=r"step-00000012 holds step 4"):
        resume(session, checkpoints)
    shutil.rmtree(copy)
    assert resume(session, checkpoints).name == "step-00000008"


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A session, and the checkpoint that its run ended with."""
    path = tmp_path_factory.mktemp("finished") / "r"
    session, folder = start(small_config(corpus), path)
    finish(session, folder)
    return session, newest(path)


EVALUATION = {"loss": 1.0, "targets": 3, "score": -1.0, "text": "loss 1"}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step", "x", "step in its state is 'x', not a count"),
        ("step", True, "step in its state is True"),
        ("step", ..., "step in its state is missing"),
        ("tokens", float("nan"), "tokens in its state is nan, not a count"),
        ("tokens", -1, "tokens in its state is -1"),
        ("tokens", "10**5000", "tokens in its state is a number of more than 4,300 digits"),
        ("precision", ..., "precision in its state is missing, not a table"),
        ("precision", [], r"precision in its state is \[\]"),
        ("precision", {"policy": "bf16-mixed"}, "precision state has keys"),
        ("precision.loss_scale", 3, "loss_scale=3"),
        ("precision.loss_scale", {"scale": "x"}, "scale"),
        ("precision.applied_total", "many", "applied_total='many'"),
        ("precision.policy", None, "precision.policy in its state is missing"),
        ("best", {"step": 4}, "best.score|best.evaluation in its state is missing"),
        ("best", {"step": 4, "score": 1.0, "evaluation": {}}, "best.evaluation in its state"),
        ("best", {"step": 4, "score": "x", "evaluation": EVALUATION}, "best.score"),
        ("best", {"score": 1.0, "evaluation": EVALUATION}, "best.step"),
        (
            "best",
            {"step": 4, "score": 1.0, "evaluation": {**EVALUATION, "confusion": [[1], 2]}},
            "confusion",
        ),
        ("best", {"step": 4, "score": 1.0, "evaluation": {**EVALUATION, "odd": 1}}, "odd"),
        ("made_with", "x", "made_with in its state is 'x'"),
        ("made_with", ..., "made with another|data in its state"),
    ],
)
def test_a_state_that_is_none_is_refused_by_its_key(finished, key, value, message):
    session, checkpoint = finished
    state = json.loads(json.dumps(checkpoint.state))
    *above, last = key.split(".")
    level = state[above[0]] if above else state
    if value is ...:
        del level[last]
    else:
        level[last] = 10**5000 if value == "10**5000" else value
    where = Path("checkpoints") / "step-00000008"
    with pytest.raises((CheckpointError, PrecisionError), match=message):
        session.restore(dataclasses.replace(checkpoint, state=state), where)
    session.restore(checkpoint, where)
    assert session.step == 8
