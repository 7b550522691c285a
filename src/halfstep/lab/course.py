"""The experiments of the course, in its order."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.errors import ConfigError
from halfstep.lab.experiment import Experiment
from halfstep.lab.experiments.accuracy import accumulation, low_bit, parity
from halfstep.lab.experiments.costs import communication, memory, speed
from halfstep.lab.experiments.numbers import (
    formats,
    loss_scale,
    lost_updates,
    overflow,
    small_updates,
    underflow,
)
from halfstep.trainer.config.read import did_you_mean

EXPERIMENTS: Mapping[str, Experiment] = {
    each.name: each
    for each in (
        formats.EXPERIMENT,
        small_updates.EXPERIMENT,
        underflow.EXPERIMENT,
        loss_scale.EXPERIMENT,
        overflow.EXPERIMENT,
        lost_updates.EXPERIMENT,
        accumulation.EXPERIMENT,
        memory.EXPERIMENT,
        communication.EXPERIMENT,
        speed.EXPERIMENT,
        parity.EXPERIMENT,
        low_bit.EXPERIMENT,
    )
}
"""Name to experiment."""


def experiment(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
        ConfigError: If there is none, with the nearest name and all of them.
    """
    if name not in EXPERIMENTS:
        hint = did_you_mean(name, EXPERIMENTS)
        raise ConfigError(f"no experiment {name!r}{hint}; allowed: all, {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
