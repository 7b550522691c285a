"""The lost-update meter in whole runs: metrics, resume, and what is said aloud."""

import itertools
import json

import pytest
import torch

from halfstep.cli.console import RunDisplay
from halfstep.errors import ConfigError
from halfstep.trainer.checkpoint.store import list_checkpoints, load_checkpoint
from halfstep.trainer.config.config import load_config
from halfstep.trainer.data.progress import no_progress
from halfstep.trainer.loop import train
from halfstep.trainer.run.folder import create_run, reopen_run
from halfstep.trainer.run.resume import require_resumable, resume, with_run_folder
from halfstep.trainer.session import open_session

DECAY, REST = "group 0 (weight decay 0.1)", "group 1 (weight decay 0)"


def config_for(corpus, policy, **overrides):
    values = {
        "precision": policy,
        "data.train": [str(corpus)],
        "data.tokenizer": "bytes",
        "model.n_layer": 1,
        "model.n_head": 2,
        "model.n_embd": 32,
        "model.block_size": 32,
        "optimizer.learning_rate": 1e-4,
        "run.max_steps": 8,
        "run.batch_size": 4,
        "run.eval_every": 0,
        "run.eval_batches": 1,
        "run.save_every": 4,
        "run.keep": 9,
        "run.lost_update_every": 3,
        "run.device": "cpu",
        "schedule.warmup_steps": 0,
    }
    values |= {f"run.{key}": value for key, value in overrides.items()}
    return load_config("gpt-tiny", list(values.items()))


def run(config, path, until=99):
    session = open_session(with_run_folder(config, path), no_progress)
    folder = reopen_run(path) if path.exists() else create_run(path, session)
    resume(session, folder.path / "checkpoints")
    ticks = []
    for tick in train(session, folder.path):
        ticks.append(tick)
        if tick.record.step == until:
            break
    folder.close()
    hooks = session.precision.optimizers[0]._optimizer_step_post_hooks.values()
    assert until < 99 or not any("lost_updates" in hook.__module__ for hook in hooks)
    return ticks


def lines(path):
    text = (path / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, text)}


def test_measured_steps_are_in_the_metrics_and_told_once(corpus, tmp_path):
    ticks = run(config_for(corpus, "bf16-pure"), tmp_path / "run")
    found = lines(tmp_path / "run")
    assert [step for step, record in found.items() if "lost_updates" in record] == [3, 6]
    for step in (3, 6):
        assert found[step]["lost_updates"].keys() == {DECAY, REST}
        assert 0.1 < found[step]["lost_updates"][DECAY] < 1
        assert found[step]["lost_updates"][REST] > 0.1  # the gains, at 1
        assert 0 < found[step]["frozen_below"][DECAY] < 1e-3
    told = {tick.record.step: tick.verdicts for tick in ticks if tick.verdicts}
    assert list(told) == [3]
    assert [verdict.split(": ")[0] for verdict in told[3]] == [DECAY, REST]
    assert all("% of updates are lost at lr" in verdict for verdict in told[3])


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-master", "bf16-split", "bf16-sr"])
def test_where_nothing_is_lost_nothing_is_said(corpus, tmp_path, policy):
    ticks = run(config_for(corpus, policy), tmp_path / "run")
    found = lines(tmp_path / "run")
    # fp32 too has a gap; an update of 1e-4 is below it only where its gradient nearly cancels.
    assert all(share < 1e-3 for share in found[6]["lost_updates"].values())
    assert not any(tick.verdicts for tick in ticks)


def test_the_meter_does_not_change_the_run_and_can_be_switched_off(corpus, tmp_path):
    for every in (0, 1):
        ticks = run(
            config_for(corpus, "bf16-split", lost_update_every=every), tmp_path / f"{every}"
        )
        assert [t.record.lost_updates is not None for t in ticks] == [bool(every)] * 8
    a, b = (load_checkpoint(list_checkpoints(tmp_path / name / "checkpoints")[-1]) for name in "01")
    for name, tensor in a.weights.items():
        assert torch.equal(tensor, b.weights[name]), name


@pytest.mark.parametrize("policy", ["bf16-pure", "bf16-sr", "fp16-mixed"])
def test_resume_measures_the_same_steps_and_elements(corpus, tmp_path, policy):
    config = config_for(corpus, policy)
    run(config, tmp_path / "whole")
    run(config, tmp_path / "cut", until=5)  # the newest checkpoint is of step 4
    run(config, tmp_path / "cut")
    whole, cut = lines(tmp_path / "whole"), lines(tmp_path / "cut")
    for key in ("loss", "lost_updates", "frozen_below"):
        assert [r.get(key) for r in whole.values()] == [r.get(key) for r in cut.values()]
    assert sum("lost_updates" in record for record in cut.values()) == 2


def test_a_skipped_step_is_not_measured(corpus, tmp_path):
    scale = "params=fp32,compute=fp16,scale=dynamic,init_scale=16777216,growth_interval=3"
    run(config_for(corpus, scale, max_steps=16, lost_update_every=1), tmp_path / "run")
    found = lines(tmp_path / "run").values()
    assert [r["applied"] for r in found] == ["lost_updates" in r for r in found]
    applied = [r["applied"] for r in found]
    assert any(a and not b for a, b in itertools.pairwise(applied))


def test_the_key_is_checked_and_may_change_on_resume(corpus):
    saved = config_for(corpus, "bf16-mixed")
    require_resumable(saved, config_for(corpus, "bf16-mixed", lost_update_every=7))
    with pytest.raises(ConfigError, match="lost_update_every=-1"):
        config_for(corpus, "bf16-mixed", lost_update_every=-1)
    assert load_config("gpt-tiny").run.lost_update_every == 50


def test_the_display_says_it(corpus, tmp_path, capsys):
    ticks = run(config_for(corpus, "bf16-pure", lost_update_every=4), tmp_path / "run")
    with RunDisplay("title") as display:
        for tick in ticks:
            display.stepped(tick, 8)
    said = [line for line in capsys.readouterr().err.splitlines() if "updates are lost" in line]
    assert len(said) == 2
    assert said[0].startswith(f"step 4: {DECAY}: ")
