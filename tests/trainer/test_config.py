import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st

from halfstep.errors import ConfigError, PrecisionError
from halfstep.trainer.config.config import TASKS, config_to_toml, load_config, shipped_configs
from halfstep.trainer.models.gpt.gpt import GPT

FINETUNE = ["classify-pretrained", "classify-scratch", "lm-full", "lm-lora"]
NAMES = ["gpt-small-cpu", "gpt-tiny", "gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl"]


def test_the_shipped_configurations():
    assert list(shipped_configs()) == sorted(FINETUNE + NAMES)


@pytest.mark.parametrize("name", FINETUNE + NAMES)
def test_a_shipped_configuration_is_valid_and_round_trips(name, tmp_path):
    config = load_config(name)
    assert config.name == name
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config))
    assert load_config(str(path)) == config


@pytest.mark.parametrize(
    ("name", "vocabulary", "count"),
    [
        ("gpt-tiny", 1024, 940800),  # with its own tokenizer: about 1 M
        ("gpt-small-cpu", 8192, 13891584),
        # those of the published checkpoints
        ("gpt2", 50257, 124439808),
        ("gpt2-medium", 50257, 354823168),
        ("gpt2-large", 50257, 774030080),
        ("gpt2-xl", 50257, 1557611200),
    ],
)
def test_a_shipped_configuration_has_the_size_it_says(name, vocabulary, count):
    shape = load_config(name, [("model.vocab_size", vocabulary)]).model
    with torch.device("meta"):
        assert GPT(shape).num_parameters() == count


@settings(max_examples=30, deadline=None)
@given(
    steps=st.integers(60, 10**9),
    rate=st.floats(1e-9, 1e3),
    seed=st.integers(0, 2**63 - 1),
    paths=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
                   .filter(str.strip), max_size=3),
)  # fmt: skip
def test_every_value_survives_the_file(tmp_path_factory, steps, rate, seed, paths):
    overrides = [
        ("run.max_steps", steps),
        ("optimizer.learning_rate", rate),
        ("run.seed", seed),
        ("data.train", paths),
    ]
    config = load_config("gpt-tiny", overrides)
    assert (config.run.max_steps, config.optimizer.learning_rate) == (steps, rate)
    path = tmp_path_factory.mktemp("c") / "c.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(str(path)) == config


def test_strings_of_the_command_line_become_the_fields_types():
    config = load_config(
        "gpt-tiny",
        [
            ("run.max_steps", "70"),
            ("optimizer.learning_rate", "3e-4"),
            ("run.compile", "true"),
            ("run.report_to", "tensorboard"),
            ("data.train", "a.txt"),
            ("model.n_layer", "2"),
        ],
    )
    assert config.run.max_steps == 70
    assert config.optimizer.learning_rate == 3e-4
    assert config.run.compile is True
    assert config.run.report_to == ("tensorboard",)
    assert config.data.train == ("a.txt",)
    assert config.model.n_layer == 2


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("run.max_stepz", "3", ["unknown key run.max_stepz", "did you mean 'max_steps'"]),
        ("optimiser.eps", "3", ["unknown key optimiser", "did you mean 'optimizer'"]),
        ("run.max_steps", "many", ["run.max_steps", "'many'", "an integer"]),
        ("run.max_steps", 3.5, ["run.max_steps", "an integer"]),
        ("run.max_steps", True, ["run.max_steps", "an integer"]),
        ("run.max_steps", "0", ["run.max_steps=0", ">= 1"]),
        ("run.compile", "yes", ["run.compile", "true or false"]),
        ("run.report_to", "wanda", ["run.report_to", "tensorboard, wandb"]),
        ("optimizer.learning_rate", "nan", ["optimizer.learning_rate", "finite"]),
        ("optimizer.learning_rate", "-1", ["optimizer.learning_rate=-1.0", "> 0"]),
        ("optimizer.beta2", "1", ["optimizer.beta2", "< 1"]),
        ("run.grad_accum", "3", ["run.batch_size=16", "run.grad_accum=3"]),
        ("run.block_size", "4096", ["run.block_size=4096", "model.block_size=128"]),
        ("schedule.warmup_steps", "999", ["warmup_steps=999", "max_steps=200"]),
        ("run", "3", ["run", "a section"]),
        ("data.tokenizer", "bpe:3", ["data.tokenizer"]),
        ("model.n_head", "3", ["model.n_"]),
        ("name.x", "3", ["name is a value"]),
    ],
)
def test_each_mistake_is_named(key, value, words):
    with pytest.raises(ConfigError) as error:
        load_config("gpt-tiny", [(key, value)])
    for word in [*words, "gpt-tiny"]:
        assert word in str(error.value)


def test_a_bad_policy_is_refused_with_the_configuration():
    with pytest.raises(PrecisionError, match="fp32"):
        load_config("gpt-tiny", [("precision", "fp31")])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'gpt-tiny'.*path to a \.toml"):
        load_config("gpt-tinny")
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_config(str(tmp_path / "missing.toml"))
    bad = tmp_path / "bad.toml"
    bad.write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML"):
        load_config(str(bad))
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(str(bad))


def test_every_annotated_name_is_a_field():
    """A default without an annotation would silently be no field at all."""

    def walk(cls):
        names = {field.name for field in dataclasses.fields(cls)}
        public = {
            name
            for name, value in vars(cls).items()
            if not name.startswith("_")
            and not name.isupper()  # a constant of the class
            and not callable(value)
            and not isinstance(value, property | classmethod)
        }
        assert public <= names
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(field.default_factory):
                walk(field.default_factory)

    for kind in TASKS.values():
        walk(kind)
