"""What a run trains, as the loop sees it (``Task``), and the model that it leaves (``Trained``)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import ParallelPlan, plan_of
from halfstep.precision.casting.autocast import Autocast, require_support
from halfstep.precision.casting.cast import cast_to_policy_
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.checkpoint import Exported
from halfstep.trainer.config.config import dotted
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import Use
from halfstep.trainer.environment import choose_device
from halfstep.trainer.models import IGNORE_INDEX
from halfstep.trainer.step import (
    Batch,
    Evaluation,
    Judge,
    learning_rate,
    make_optimizer,
)


class Task(Protocol):
    """A model, its data and its evaluation, with defaults for what most tasks do alike.

    All ranks call every method together, except where a docstring says otherwise.
    """

    model: Any
    """The module that is trained; the default :meth:`loss_sum` calls its ``loss_sum``."""
    config: BaseConfig
    """The configuration, with everything filled in that depends on data and model."""
    identity: Mapping[str, str]
    """Name to hash of what a checkpoint must have been made with, such as the data."""
    smallest_batch: int
    """Rows of the smallest batch that a step can have, over all ranks."""
    notes: list[str]
    """Messages about the data and model for the user, one sentence each."""
    evaluates: bool = True
    """Whether there is validation data."""
    keeps_best: bool
    """Whether the state with the best evaluation is kept, besides the newest."""
    lengths_vary: bool = False
    """Whether batches of one run have rows of different lengths."""
    by_block: bool = False
    """Whether only the model's blocks can be compiled, and not what is around them."""

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the model's summed loss and count, both fp32 scalars."""
        found: tuple[Tensor, Tensor] = self.model.loss_sum(batch)
        return found

    def plan(self, layout: Layout) -> ParallelPlan:
        """Return how the model may be split over the ranks."""
        return plan_of(self.model)

    def laid_out_(self, device: torch.device) -> None:
        """Give the model, of which a rank may hold a part now, what was left out until then."""
        return

    def optimizer(self, policy: PrecisionPolicy) -> Optimizer:
        """Make the optimizer, once the model is on its device and laid out over the ranks."""
        config = self.config
        return make_optimizer(self.model, config.optimizer, policy, seed=config.run.seed)

    def learning_rate(self, peak: float, applied: int) -> float:
        """Compute a parameter group's rate at the next step; see :func:`learning_rate`."""
        return learning_rate(peak, self.config.schedule, applied, self.config.run.max_steps)

    def summary(self) -> str:
        """Describe the model and the data to the user in a few words."""

    def batch_size(self, step: int) -> int:
        """Return the rows of a step's batch, over all ranks."""

    def batch(self, step: int, rows: range) -> Batch:
        """Return some rows of a step's batch, on the host; a pure function."""

    def targets(self, batch: Batch) -> float:
        """Return a batch's share of the divisor, by whose sum the step's summed loss is divided.

        The default counts the targets of (tokens, targets, ...) that enter the loss; on the host.
        """
        return int((batch[1] != IGNORE_INDEX).sum())

    def tokens(self, step: int) -> int:
        """Return the tokens of a step's batch over all ranks, without padding."""

    def evaluate(self, judge: Judge) -> Evaluation:
        """Evaluate the model, which is in evaluation mode; every target once over all ranks."""

    def save(self, folder: Path) -> None:
        """Write into a new run folder what using the model takes besides weights; on rank 0 only.

        The default writes nothing.
        """
        return

    def improved(self, folder: Path, step: int, evaluation: Evaluation) -> None:
        """Write a report on an evaluation that is the best so far; on rank 0 only."""
        return

    def finish(self, folder: Path, exported: Callable[[], Exported]) -> str:
        """Write the result into the run folder at its end, on rank 0; say what was written.

        ``exported`` returns the state to write.
        """
        return ""

    def close(self) -> None:
        """Release what the data needed, such as worker processes."""
        return


class Trained:
    """The trained model of a run; each task adds the verbs that it supports.

    These are ``predict``, ``generate``, ``evaluate`` and ``export``. Every verb raises a
    HalfstepError for an unfinished run, damaged files, or a policy that is not supported.
    """

    model: Any
    tokenizer: Any
    policy: PrecisionPolicy
    device: torch.device

    def __init__(self, path: Path, config: Any) -> None:
        """Load nothing yet; ``path`` is a run folder with its ``config``."""
        self.path, self.config = path, config
        self.notes: list[str] = []

    def open(self, use: Use) -> Self:
        """Load the model on its device and under its policy, in evaluation mode."""
        self.device = choose_device(use.device)
        self.policy = parse_policy(use.precision or self.config.precision, self.device)
        require_support(self.policy, self.device)
        self.load()
        self.cast_()
        self.model.to(self.device).eval()
        return self

    def load(self) -> None:
        """Set ``model``, with its weights as they are stored, and ``tokenizer``."""
        raise NotImplementedError

    def cast_(self) -> None:
        """Give the weights the policy's dtypes."""
        cast_to_policy_(self.model, self.policy)

    def around(self) -> AbstractContextManager[None]:
        """Return the context manager of a forward pass in the policy's precision."""
        return Autocast(self.policy, self.model, self.device)


# What all ranks have in common, and how they share the rows of a batch.


def facts(config: BaseConfig) -> dict[str, str]:
    """Return what must be equal on all ranks: versions and every key."""
    facts = {"torch version": torch.__version__, "halfstep version": metadata.version("halfstep")}
    return facts | {key: str(value) for key, value in dotted(config).items()}


def shortened(asked: int, used: int) -> list[str]:
    """Return a note if the warm-up is shorter than was asked for."""
    return [f"the warm-up is {used} steps instead of {asked}: as long as the run"] * (used < asked)


def share_of(size: int, rank: int, ranks: int) -> range:
    """Return a rank's contiguous share of ``size`` items; shares differ by one at most."""
    return range(rank * size // ranks, (rank + 1) * size // ranks)


def micro_batches(size: int, share: int, shares: int, grad_accum: int) -> list[range]:
    """Split a share of a step's ``size`` rows into the rows of ``grad_accum`` micro-batches."""
    mine = share_of(size, share, shares)
    parts = [share_of(len(mine), number, grad_accum) for number in range(grad_accum)]
    return [mine[part.start : part.stop] for part in parts]


def dropout_seed(seed: int, step: int, first_row: int) -> int:
    """Derive a micro-batch's seed from the run's seed, the step and its first row in the batch.

    So a resumed run needs no random state, and a rank draws the same dropout masks as one process
    does for a micro-batch that begins at the same row.
    """
    text = f"dropout {seed} {step} {first_row}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
