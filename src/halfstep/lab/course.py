"""The experiments of the course, in its order."""

from __future__ import annotations

from collections.abc import Mapping

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

EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
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
