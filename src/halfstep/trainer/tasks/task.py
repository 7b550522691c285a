"""What a run trains: its model, data and measure, behind one protocol that the loop knows."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.distributed.layout import Layout
from halfstep.distributed.plan import ParallelPlan, plan_of
from halfstep.distributed.world import World
from halfstep.errors import ConfigError
from halfstep.precision.casting.cast import around_model
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.trainer.config.config import config_to_table
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import (
    ClassifierConfig,
    ClassifyConfig,
    FinetuneConfig,
    LMConfig,
)
from halfstep.trainer.config.use import Evaluating, Exporting, Generating, Predicting
from halfstep.trainer.data.instructions.config import InstructionsConfig
from halfstep.trainer.data.labelled.length_batches import EpochBatches
from halfstep.trainer.evaluate import Evaluation, Judge
from halfstep.trainer.models.pretrained.hub import pin
from halfstep.trainer.optimizer import learning_rate, make_optimizer
from halfstep.trainer.step import Batch

Progress = Callable[[str, int, int], None]
"""Called while data is prepared: what, how far, of how much."""


class Exported(NamedTuple):
    """What a checkpoint hands out, by name: fp32 weights, and what modules keep besides them."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Task(Protocol):
    """A model, its data and its measure; what most tasks do alike is done here.

    All ranks call all methods together, but for those of which it is said otherwise.
    """

    model: Any
    """What is trained: a module, which for :meth:`loss_sum` has a method of that name."""
    config: BaseConfig
    """With everything filled in that only data and model could tell."""
    identity: Mapping[str, str]
    """What a checkpoint must have been made with, such as its data: name to hash."""
    smallest_batch: int
    """Rows of the smallest batch of a step, over all ranks."""
    notes: list[str]
    """What a user should know of the data, one sentence each."""
    evaluates: bool = True
    """Whether there is anything to measure the model on."""
    keeps_best: bool
    """Whether the state with the best evaluation is kept, besides the newest."""

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The model's summed loss and count, both fp32 scalars."""
        found: tuple[Tensor, Tensor] = self.model.loss_sum(batch)
        return found

    def plan(self, layout: Layout) -> ParallelPlan:
        """How the model may be split."""
        return plan_of(self.model)

    def optimizer(self, policy: PrecisionPolicy) -> Optimizer:
        """What trains the model, which lies on its device and over the ranks by now."""
        config = self.config
        return make_optimizer(self.model, config.optimizer, policy, seed=config.run.seed)

    def learning_rate(self, peak: float, taken: int, applied: int) -> float:
        """The next step's rate of a parameter group; see :func:`learning_rate`."""
        config = self.config
        return learning_rate(peak, config.schedule, taken, applied, config.run.max_steps)

    def summary(self) -> str:
        """What is trained, and on what, in a few words."""

    def batch_size(self, step: int) -> int:
        """Rows of a step's batch, over all ranks."""

    def batch(self, step: int, rows: range) -> Batch:
        """Rows of a step's batch, on the host; a pure function."""

    def targets(self, batch: Batch) -> float:
        """What the losses' sum is divided by: the sum of this over all batches of the step."""

    def tokens(self, step: int) -> int:
        """Tokens of a step's batch over all ranks, without padding."""

    def flops(self, tokens: float) -> float:
        """Arithmetic of training on so many tokens, in operations."""

    def evaluate(self, judge: Judge) -> Evaluation:
        """Measure the model, which is in evaluation mode; every target once over all ranks."""

    def save(self, folder: Path) -> None:
        """Write into a new run folder what the model's use needs besides weights; rank 0.

        A model that is the user's own needs nothing.
        """
        return

    def improved(self, folder: Path, step: int, evaluation: Evaluation) -> None:
        """Write what there is to tell of an evaluation that is the best so far; rank 0."""
        return

    def finish(self, folder: Path, exported: Callable[[], Exported]) -> str:
        """Write what the user takes away, at the run's end; rank 0.

        Args:
            folder: The run's.
            exported: Gives the state to take.

        Returns:
            What was written, in words; empty for nothing.
        """
        return ""

    def close(self) -> None:
        """Let go of what the data needed, such as other processes."""
        return


class EpochTask(Task):
    """A task of which an epoch's batches hold every example once."""

    config: FinetuneConfig

    def deal(self, config: FinetuneConfig, lengths: npt.ArrayLike) -> None:
        """Take the configuration, with steps in place of epochs, and the examples' tokens."""
        run = config.run
        self._lengths = np.asarray(lengths)
        self._batches = EpochBatches(lengths, run.batch_size, run.seed)
        self.smallest_batch = len(self._lengths) // self._batches.steps_per_epoch
        self.config = config.resolved(self._batches.steps_per_epoch)

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """The examples of a step."""
        return self._batches.indices(step)

    def batch_size(self, step: int) -> int:
        """Examples of the step; those of an epoch differ by one at most."""
        return len(self.indices(step))

    def tokens(self, step: int) -> int:
        """Tokens of the step's examples, special ones included."""
        return int(self._lengths[self.indices(step)].sum())


@dataclass(frozen=True, slots=True)
class Measured:
    """How good a trained model is: in words, as plain values, and what a user should know of it."""

    text: str
    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)


class Trained:
    """What a run left, or the folder of a model, in use; a task has some of the verbs.

    Every verb raises a HalfstepError for a run that has not ended, damaged files, or a policy that
    cannot be honoured.
    """

    def __init__(self, path: Path, config: Any = None) -> None:
        """Load nothing yet; ``path`` is a run's with its ``config``, or a model's folder."""
        self.path, self.config = path, config
        self.notes: list[str] = []

    def predict(self, use: Predicting, texts: Iterable[str]) -> Iterator[tuple[str, str, float]]:
        """(text, label, probability) of each text, in their order."""
        raise self._without("predict")

    def generate(self, use: Generating) -> str:
        """The text that the model writes."""
        raise self._without("generate")

    def evaluate(self, use: Evaluating, progress: Progress) -> Measured:
        """How good the model is on the run's validation data, or on other data."""
        raise self._without("evaluate")

    def export(self, use: Exporting) -> str:
        """Write the model as a folder for others; what was written, in words."""
        raise self._without("export")

    def _without(self, verb: str) -> ConfigError:
        verbs = ("predict", "generate", "evaluate", "export")
        own = [verb for verb in verbs if getattr(type(self), verb) is not getattr(Trained, verb)]
        by = self.config.COMMAND or "halfstep.Trainer"
        instead = f"there is {', '.join(own)}" if own else f"load {self.path / 'model'} yourself"
        return ConfigError(f"{self.path} is a run of {by}, for which there is no {verb}; {instead}")


@dataclass
class InUse:
    """A model in evaluation mode on its device, under a policy."""

    model: Any
    policy: PrecisionPolicy
    device: torch.device

    def around(self) -> AbstractContextManager[None]:
        """The context of a forward pass in the policy's precision."""
        return around_model(self.policy, self.model, self.device)

    @property
    def judge(self) -> Judge:
        """How the model is measured."""
        return Judge(self.model.loss_sum, self.around, self.device)


# What ranks have alike, and what each has for itself.


def facts(config: BaseConfig) -> dict[str, str]:
    """What all ranks must have alike: versions, and every key but where data is kept."""
    table = config_to_table(config)
    table.get("data", {}).pop("cache_dir", None)
    sections = {name: part for name, part in table.items() if isinstance(part, dict)}
    facts = {"torch version": torch.__version__, "halfstep version": metadata.version("halfstep")}
    facts |= {name: str(value) for name, value in table.items() if name not in sections}
    return facts | {
        f"{name}.{key}": str(value)
        for name, part in sections.items()
        for key, value in part.items()
    }


def share_of(size: int, rank: int, ranks: int) -> range:
    """Which of ``size`` things a rank takes; the shares follow each other without a gap."""
    return range(rank * size // ranks, (rank + 1) * size // ranks)


def micro_batches(size: int, share: int, shares: int, grad_accum: int) -> list[range]:
    """The rows of each of the ``grad_accum`` micro-batches of a share of a step's ``size`` rows."""
    mine = share_of(size, share, shares)
    parts = [share_of(len(mine), number, grad_accum) for number in range(grad_accum)]
    return [mine[part.start : part.stop] for part in parts]


def dropout_seed(seed: int, step: int, first_row: int) -> int:
    """A seed for each micro-batch, by its first row in the step's batch.

    So a resumed run needs no random state, and a rank's masks are those of a micro-batch of one
    process that begins at the same row.
    """
    text = f"dropout {seed} {step} {first_row}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


# One commit of a model on the hub for a whole run: all ranks, model and tokenizer, resumes.


Config = TypeVar("Config", ClassifyConfig, LMConfig)


def pinned(config: Config, world: World) -> tuple[Config, dict[str, Any]]:
    """The configuration with the commit that its model's name means now; all ranks together.

    Returns:
        The configuration, and what opening model and tokenizer takes: revision and trust.

    Raises:
        ConfigError: If there is no such model.
    """
    choice = config.model
    trust = choice.trust_remote_code
    own = world.main_only(lambda: pin(choice.source, choice.revision, trust_remote_code=trust))
    revision = world.share(own or "")
    model: Any = dataclasses.replace(choice, revision=revision)
    options = {"revision": revision, "trust_remote_code": trust}
    return dataclasses.replace(config, model=model), options


Part = TypeVar("Part", ClassifierConfig, InstructionsConfig)


def within(part: Part, section: str, limit: int | None, source: str) -> Part:
    """A section whose ``max_length`` is within a model's positions, if need be those.

    Raises:
        ConfigError: More were asked for.
    """
    if limit is None or part.max_length <= limit:
        return part
    if part.max_length != type(part)().max_length:
        raise ConfigError(
            f"{section}.max_length={part.max_length} is over the {limit} positions of "
            f"model.source={source}; lower --max-length"
        )
    return dataclasses.replace(part, max_length=limit)
