"""What an experiment is, and what comes of one that was made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from halfstep.errors import ConfigError
from halfstep.precision.policy.devices import cpu_has_bf16, cpu_name
from halfstep.trainer.config.read import build, require_ranges
from halfstep.words import Phrases, read_phrases

PHRASES: Phrases = read_phrases("halfstep.lab")
Data = dict[str, Any]
"""What was measured: numbers, strings, lists and dicts of them, as JSON holds them."""


class Say:
    """The phrases of one experiment in one language: ``say("verdict", share=0.1)``."""

    def __init__(self, experiment: str, language: str) -> None:
        self.language = language
        self._experiment = experiment

    def __call__(self, name: str, /, **values: Any) -> str:
        """The phrase ``EXPERIMENT.name`` of words.toml, or the shared one, with values put in."""
        own = f"{self._experiment}.{name}"
        return PHRASES[own if own in PHRASES else name][self.language].format(**values)


@dataclass(frozen=True)
class Experiment:
    """One question, and how it is answered by measuring.

    Its phrases in ``words.toml`` are ``NAME.title``, ``NAME.question``, ``NAME.FIELD`` for each
    option, ``NAME.look`` (what to look at in the figure), and what ``draw`` and ``verdict`` say.
    """

    name: str
    options: type[Any]
    """A frozen dataclass of at most three fields: the things to change, with their defaults."""
    measure: Callable[[Any], Data]
    """The measurement: options to plain numbers, in less than a minute on two cores."""
    draw: Callable[[Any, Data, Say], None]
    """Draws what was measured into a figure of matplotlib, without computing anything new."""
    verdict: Callable[[Data, Say], str]
    """The one sentence that follows from the numbers, whatever they are."""
    size: tuple[float, float] = (6.4, 4.6)
    """Inches of the figure; wider, its letters would be too small on a telephone."""

    def options_of(self, given: Mapping[str, str]) -> Any:
        """The options, with those given by name as text.

        Raises:
            ConfigError: For a name or a value that there is not, with what is allowed.
        """
        options = build(self.options, dict(given), named=f"halfstep lab {self.name}: {{}}".format)
        require_ranges(f"halfstep lab {self.name}", options)
        return options

    def changeable(self, language: str) -> list[tuple[str, Any, str]]:
        """The things to change: name, default, and what changing it shows."""
        say = Say(self.name, language)
        return [
            (f.name, getattr(self.options(), f.name), say(f.name)) for f in fields(self.options)
        ]


@dataclass(frozen=True)
class Made:
    """An experiment that was made: its options and its numbers."""

    experiment: Experiment
    options: Any
    data: Data

    def verdict(self, language: str) -> str:
        """The sentence that follows from the numbers."""
        return self.experiment.verdict(self.data, Say(self.experiment.name, language))

    def to_json(self) -> Data:
        """What is written beside the figure."""
        return {
            "experiment": self.experiment.name,
            "options": asdict(self.options),
            "machine": machine(),
            "data": self.data,
        }


def machine() -> Data:
    """Where an experiment is made, and how busy it is there: times and bytes depend on it."""
    return {
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "bf16_instructions": cpu_has_bf16(),
        "torch": torch.__version__,
    }


def make(experiment: Experiment, given: Mapping[str, str] | None = None) -> Made:
    """Make an experiment, with options given by name as text.

    Raises:
        ConfigError: For options that it does not have.
    """
    options = experiment.options_of(given or {})
    return Made(experiment, options, experiment.measure(options))


def read_settings(words: tuple[str, ...]) -> dict[str, str]:
    """``("steps=20", "seeds=1")`` as a mapping.

    Raises:
        ConfigError: For a word that is no NAME=VALUE.
    """
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"{word!r} is no setting; write NAME=VALUE, such as steps=20")
        if name in pairs:
            raise ConfigError(f"{name} is given twice; give it once")
        pairs[name] = value
    return pairs
