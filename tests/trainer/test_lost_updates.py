"""The lost-update meter in whole runs: metrics, and what is said aloud."""

from tests.trainer.runs import metrics, run, small_config

from halfstep.cli.train import RunDisplay

DECAY, REST = "group 0 (weight decay 0.1)", "group 1 (weight decay 0)"


def config_for(corpus, policy, **overrides):
    values = {
        "optimizer__learning_rate": 1e-4, "schedule__warmup_steps": 0, "run__max_steps": 6,
        "run__eval_every": 0, "run__eval_batches": 1, "run__lost_update_every": 3,
    }  # fmt: skip
    return small_config(corpus, policy, **{**values, **overrides})


def test_measured_steps_are_in_the_metrics_and_told_once(corpus, tmp_path, capsys):
    session, ticks = run(config_for(corpus, "bf16-pure"), tmp_path / "run")
    hooks = session.precision.optimizers[0]._optimizer_step_post_hooks.values()
    assert not any("lost_updates" in hook.__module__ for hook in hooks)
    found = {record["step"]: record for record in metrics(tmp_path / "run")}
    assert [step for step, record in found.items() if "lost_updates" in record] == [3, 6]
    for step in (3, 6):
        assert found[step]["lost_updates"].keys() == {DECAY, REST}
        assert 0.1 < found[step]["lost_updates"][DECAY] < 1
        assert found[step]["lost_updates"][REST] > 0.1  # the gains, at 1
    told = {tick.record.step: tick.verdicts for tick in ticks if tick.verdicts}
    assert list(told) == [3]
    assert [verdict.split(": ")[0] for verdict in told[3]] == [DECAY, REST]
    assert all("% of updates are lost at lr" in verdict for verdict in told[3])
    with RunDisplay("title") as display:
        for tick in ticks:
            display.stepped(tick, 6)
    said = [line for line in capsys.readouterr().err.splitlines() if "updates are lost" in line]
    assert len(said) == 2
    assert said[0].startswith(f"step 3: {DECAY}: ")


def test_fp32_weights_lose_nothing_to_their_format(corpus, tmp_path):
    config = config_for(corpus, "fp32", optimizer__learning_rate=1e-10)
    _, ticks = run(config, tmp_path / "run")
    assert max(ticks[2].record.lost_updates.values()) > 0.5
    assert not any(tick.verdicts for tick in ticks)
