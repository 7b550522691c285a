"""Epochs to steps, warm-up by share, and configurations that go to a file and back."""

import pytest

from halfstep.errors import ConfigError
from halfstep.trainer.config.config import (
    config_from_table,
    config_to_table,
    config_to_toml,
    load_config,
)
from halfstep.trainer.config.finetune import ClassifyConfig, LMConfig
from halfstep.trainer.config.run import RunConfig

SHIPPED = ("classify-scratch", "classify-pretrained", "lm-lora")


def config(*pairs, shipped="classify-scratch"):
    return load_config(shipped, pairs)


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "steps"),
    [(3, 7, 21), (0.5, 7, 4), (0.01, 7, 1), (1.5, 10, 15), (0.1, 10, 1), (1.1, 10, 11), (3, 1, 3)],
)
def test_epochs_become_steps(epochs, per_epoch, steps):
    run = config(("run.epochs", epochs)).resolved(per_epoch).run
    assert (run.max_steps, run.eval_every, run.epochs) == (steps, per_epoch, epochs)


def test_max_steps_wins_over_epochs():
    found = config(("run.epochs", 9), ("run.max_steps", 5), ("run.eval_every", 2)).resolved(7)
    assert (found.run.max_steps, found.run.eval_every) == (5, 2)


@pytest.mark.parametrize(
    ("ratio", "given", "steps", "warmup"), [(0.06, 0, 100, 6), (0.06, 0, 10, 0), (0.5, 0, 9, 4),
                                            (0.06, 17, 100, 17), (0.0, 0, 100, 0)]
)  # fmt: skip
def test_warm_up_is_a_share_of_the_steps_unless_given(ratio, given, steps, warmup):
    found = config(
        ("run.warmup_ratio", ratio), ("schedule.warmup_steps", given), ("run.max_steps", steps)
    )
    assert found.resolved(7).schedule.warmup_steps == warmup


def test_a_warm_up_longer_than_the_epochs_is_refused():
    with pytest.raises(ConfigError, match=r"warmup_steps=50 is longer than the run of .*=21"):
        config(("schedule.warmup_steps", 50), ("run.epochs", 3)).resolved(7)


def test_resolving_twice_changes_nothing():
    once = config(("run.epochs", 2.5), ("run.warmup_ratio", 0.06)).resolved(40)
    assert once.resolved(40) == once
    assert once.schedule.warmup_steps == 6


@pytest.mark.parametrize("name", SHIPPED)
def test_a_configuration_goes_to_a_file_and_back(tmp_path, name):
    found = config(("run.seed", 5), ("run.best_by", "loss"), shipped=name).resolved(11)
    assert isinstance(found, LMConfig if name == "lm-lora" else ClassifyConfig)
    file = tmp_path / "config.toml"
    file.write_text(config_to_toml(found), encoding="utf-8")
    assert load_config(str(file)) == found
    assert config_from_table(config_to_table(found)) == found
    assert config_to_table(found)["task"] == found.TASK


def test_the_shipped_ones_say_what_they_are_for():
    scratch, pretrained, lm = (config(shipped=name) for name in SHIPPED)
    assert (scratch.TASK, pretrained.TASK, lm.TASK) == ("classify", "classify", "lm")
    assert scratch.model.source == "scratch:small"
    # a pretrained model is spoilt by the rate that one from scratch needs
    assert pretrained.optimizer.learning_rate < scratch.optimizer.learning_rate / 10
    assert all(c.run.max_steps == 0 and c.run.epochs > 0 for c in (scratch, pretrained, lm))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("run.epochs", 0, "run.epochs=0.0; allowed: > 0"),
        ("run.epochs", -1, "run.epochs=-1.0; allowed: > 0"),
        ("run.epochs", "nan", "run.epochs: 'nan'; allowed: a finite number"),
        ("run.max_steps", -1, "run.max_steps=-1"),
        ("run.warmup_ratio", 1, "run.warmup_ratio=1.0; allowed: 0 <= x < 1"),
        ("run.warmup_ratio", -0.1, "run.warmup_ratio=-0.1; allowed: 0 <= x < 1"),
        ("run.best_by", "f1", "run.best_by: 'f1'; allowed: '', accuracy, macro_f1, loss"),
        ("run.patience", -1, "run.patience=-1"),
        ("model.max_length", 2, "model.max_length=2; allowed: integers >= 3"),
        ("model.vocab_size", -1, "model.vocab_size=-1"),
        ("model.dropout", 1, "model.dropout=1.0; allowed: below 1"),
        ("model.label_smoothing", 1, "model.label_smoothing=1.0"),
        ("model.label_smoothing", -0.1, "model.label_smoothing=-0.1"),
        ("model.class_weights", "some", "model.class_weights: 'some'; allowed: none, balanced"),
        ("model.source", " ", "model.source is empty"),
        ("model.sorce", "x", "unknown key model.sorce, did you mean 'source'?"),
        ("data.dev_fraction", "1.5", "dev_fraction"),
    ],
)
def test_what_is_refused_is_named(key, value, words):
    with pytest.raises(ConfigError) as error:
        config((key, value))
    assert words in str(error.value)


def test_epochs_do_not_matter_beside_max_steps():
    assert config(("run.epochs", 0), ("run.max_steps", 3)).resolved(5).run.max_steps == 3


def test_a_run_from_scratch_must_have_steps():
    with pytest.raises(ConfigError, match="max_steps=0"):
        RunConfig(max_steps=0)
