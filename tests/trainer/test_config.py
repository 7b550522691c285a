import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.trainer.config.config import config_to_toml, load_config, shipped_configs
from halfstep.trainer.models.gpt import GPT

FINETUNE = ["classify-pretrained", "classify-scratch", "lm-full", "lm-lora"]


def round_trip(config, folder):
    """The configuration that is read from the file that it is written to."""
    path = folder / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    return load_config(str(path))


@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_configuration_is_valid_and_round_trips(name, tmp_path):
    config = load_config(name)
    assert config.name == name
    assert round_trip(config, tmp_path) == config
    if name in FINETUNE:
        assert name.partition("-")[0] == config.TASK
        assert config.run.max_steps == 0 < config.run.epochs
        resolved = config.resolved(11)
        assert round_trip(resolved, tmp_path) == resolved == resolved.resolved(11)


@pytest.mark.parametrize(
    ("name", "vocabulary", "count"),
    [
        ("gpt-tiny", 1024, 940800),  # with its own tokenizer: about 1 M
        ("gpt-small-cpu", 8192, 13891584),
        # those of the published checkpoints
        ("gpt2", 50257, 124439808),
        ("gpt2-xl", 50257, 1557611200),
    ],
)
def test_a_shipped_configuration_has_the_size_it_says(name, vocabulary, count):
    shape = load_config(name, [("model.vocab_size", vocabulary)]).model
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(shape).parameters()) == count


def test_every_value_survives_the_file(tmp_path):
    overrides = [("run.max_steps", 10**9), ("optimizer.learning_rate", 1 / 3),
                 ("run.seed", 2**63 - 1), ("data.train", ["a b", '"中\\n', "\tx"])]  # fmt: skip
    config = load_config("gpt-tiny", overrides)
    assert (config.run.max_steps, config.optimizer.learning_rate) == (10**9, 1 / 3)
    assert round_trip(config, tmp_path) == config


def test_strings_of_the_command_line_become_the_fields_types():
    config = load_config(
        "gpt-tiny",
        [
            ("run.max_steps", "70"),
            ("optimizer.learning_rate", "3e-4"),
            ("run.compile", "true"),
            ("data.train", "a.txt"),
            ("model.n_layer", "2"),
        ],
    )
    assert config.run.max_steps == 70
    assert config.optimizer.learning_rate == 3e-4
    assert config.run.compile == "yes"  # what old files and scripts say
    assert config.data.train == ("a.txt",)
    assert config.model.n_layer == 2


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        *(("gpt-tiny", *case) for case in (
            ("run.max_stepz", "3", ["unknown key run.max_stepz", "did you mean 'max_steps'"]),
            ("run.max_steps", "many", ["run.max_steps", "'many'", "an integer"]),
            ("run.max_steps", 3.5, ["run.max_steps", "an integer"]),
            ("run.max_steps", "0", ["run.max_steps=0", ">= 1"]),
            ("run.seed", str(2**63), [f"run.seed={2**63}; allowed: 0 to 2^63 - 1"]),
            ("run.compile", "soon", ["run.compile", "allowed: auto, yes, no"]),
            ("optimizer.learning_rate", "nan", ["optimizer.learning_rate", "finite"]),
            ("optimizer.beta2", "1", ["optimizer.beta2", "< 1"]),
            ("run.grad_accum", "3", ["run.batch_size=16", "run.grad_accum=3"]),
            ("run.block_size", "4096", ["run.block_size=4096", "model.block_size=128"]),
        )),
        ("classify-scratch", "run.epochs", 0, ["run.epochs=0.0; allowed: > 0"]),
        ("classify-scratch", "model.class_weights", "x", ["unknown key model.class_weights"]),
        ("lm-lora", "model.lora_r", -1, ["model.lora_r=-1; allowed: integers >= 0"]),
    ],
)  # fmt: skip
def test_each_mistake_is_named(name, key, value, words):
    with pytest.raises(ConfigError) as error:
        load_config(name, [(key, value)])
    for word in [*words, name]:
        assert word in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'gpt-tiny'.*path to a \.toml"):
        load_config("gpt-tinny")
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_config(str(tmp_path / "missing.toml"))
    bad = tmp_path / "bad.toml"
    bad.write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml: cannot be read"):
        load_config(str(bad))
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(str(bad))


# --- epochs ---------------------------------------------------------------------------------------


def resolved(per_epoch, **given):
    keys = {"warmup_steps": "schedule.warmup_steps"}
    pairs = [(keys.get(key, f"run.{key}"), value) for key, value in given.items()]
    return load_config("classify-scratch", pairs).resolved(per_epoch)


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "steps"),
    [(3, 7, 21), (0.5, 7, 4), (0.01, 7, 1), (1.5, 10, 15), (0.1, 10, 1), (1.1, 10, 11), (3, 1, 3)],
)
def test_epochs_become_steps(epochs, per_epoch, steps):
    run = resolved(per_epoch, epochs=epochs).run
    assert (run.max_steps, run.eval_every, run.epochs) == (steps, per_epoch, epochs)


@pytest.mark.parametrize(
    ("ratio", "given", "steps", "warmup"),
    [(0.06, 0, 100, 6), (0.06, 0, 10, 0), (0.5, 0, 9, 4), (0.06, 17, 100, 17), (0.0, 0, 100, 0)],
)
def test_warm_up_is_a_share_of_the_steps_unless_given(ratio, given, steps, warmup):
    found = resolved(7, warmup_ratio=ratio, warmup_steps=given, max_steps=steps)
    assert found.schedule.warmup_steps == warmup


def test_a_small_file_gets_steps_enough_to_learn_from():
    """Unless epochs or steps are asked for; a large one keeps its epochs."""
    runs = [load_config(f"classify-{name}").resolved(5).run for name in ("scratch", "pretrained")]
    assert [(run.max_steps, run.eval_every) for run in runs] == [(200, 10), (100, 5)]
    assert load_config("lm-lora").resolved(2).run.max_steps == 100
    large = load_config("classify-scratch").resolved(100).run
    assert (large.max_steps, large.eval_every) == (400, 100)
    assert resolved(5, epochs=9, max_steps=7).run.max_steps == 7
    assert resolved(5, epochs=2, min_steps=12).run.max_steps == 12
