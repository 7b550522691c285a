"""The configuration that runs of every task share; imports no torch, so that --help is quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from halfstep.option import (
    Amount,
    AtLeast1,
    Count,
    Fraction,
    Positive,
    Range,
    Share,
    option,
)

OptimizerName = Literal[
    "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "lion", "muon", "nadam",
    "radam", "rmsprop", "sgd",
]  # fmt: skip
"""The torch.optim optimizers with weight decay, and Lion; Muon has AdamW for all but matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its hyperparameters, and gradient clipping."""

    name: OptimizerName = option("adamw", "An optimizer of torch.optim in small letters, or lion.")
    learning_rate: Positive = option(1e-3, "Peak learning rate, reached at the end of the warm-up.")
    beta1: Share = option(
        0.9, "Decay of the first moment per step; for SGD and RMSprop, the momentum."
    )
    beta2: Share = option(0.95, "Decay of the second moment per step.")
    eps: Positive = option(
        1e-8, "Added to the root of the second moment; must not be 0 in the optimizer's format."
    )
    momentum: Share = option(
        0.95, "Muon's decay of the average of gradients; beta1 and beta2 are those of its AdamW."
    )
    weight_decay: Amount = option(
        0.1, "Weight decay of matrices and embeddings; norms and biases do not decay."
    )
    max_norm: Amount = option(
        1.0, "Gradients are clipped to this global 2-norm; 0 switches clipping off."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up, then a decay to a fraction of the peak, or none."""

    warmup_steps: Count = option(
        50, "Optimizer steps of linear warm-up; at most the length of the run."
    )
    decay: Literal["cosine", "linear", "constant"] = option(
        "cosine",
        "What follows the warm-up until the run's end: a cosine, a straight line, or the peak.",
    )
    min_ratio: Fraction = option(
        0.1, "Learning rate at the end of the decay, as a fraction of the peak."
    )


if TYPE_CHECKING:
    from halfstep.distributed.layout import Layout
    from halfstep.precision.policy.policy import PrecisionPolicy
    from halfstep.precision.recovery import Recovery

    Policy: TypeAlias = PrecisionPolicy | str
    Parallel: TypeAlias = Layout | str
else:  # as a user writes them: load_config replaces the text by the object, which imports torch
    Policy = Parallel = Recovery = str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Length of the run, batch size, checkpoints, run folder, devices and layout."""

    max_steps: AtLeast1 = option(300, "Optimizer steps, skipped ones included.")
    batch_size: AtLeast1 = option(
        8, "Sequences in one optimizer step, over all ranks and micro-batches."
    )
    grad_accum: AtLeast1 = option(1, "Micro-batches that one step's batch is split into.")
    seed: Annotated[int, Range("0 to 2^63 - 1", lambda x: 0 <= x < 2**63)] = option(
        1337, "Seed of the initial weights, the batches and dropout."
    )
    eval_every: Count = option(
        100, "Evaluate every this many steps and at the end; 0: at the end only."
    )
    eval_batches: Count = option(
        16, "Validation batches per evaluation, spread over the file; 0: all of it."
    )
    ema_decay: Share = option(
        0.0,
        "Decay of a moving average of the weights, such as 0.999; that average is then evaluated "
        "and exported. 0: none.",
    )
    on_nonfinite: Recovery = option(  # type: ignore[assignment]
        "stop",
        'What to do where no loss scale can help: "stop", or "skip:K" (leave out up to K steps in '
        "a row).",
    )
    on_spike: Recovery = option(  # type: ignore[assignment]
        "off",
        'What to do about a finite loss or gradient norm far above the steps before: "off", '
        '"stop" or "skip:K" (docs/loss-scaling.md).',
    )
    lost_update_every: Count = option(
        50, "Measure lost updates every this many applied steps (docs/lost-updates.md); 0: never."
    )
    health_every: Count = option(
        100,
        "Compare each layer with its own past on every N-th step, at first more often "
        "(docs/health.md); 0: never.",
    )
    watch: Count = option(
        0,
        "Count the exponents of weights, activations, gradients and updates on the first step and "
        "on every N-th, into numerics.jsonl (docs/watch.md); --watch alone: every 100th; 0: never.",
        bare="100",
    )
    save_every: Count = option(
        100, "Save a checkpoint every this many steps and at the end; 0: at the end only."
    )
    keep: AtLeast1 = option(
        2, "Checkpoints to keep; older ones are removed after a newer one is safely written."
    )
    output_dir: str = option("", "Run folder; empty: runs/NAME-PRECISION-TIME.")
    parallel: Parallel = option(
        "",
        'Sizes of the mesh axes that ranks share the work on: "data=2", "shard=2", "tensor=2" or '
        '"data=2,tensor=2" (docs/distributed.md); empty: data over all ranks.',
    )
    rank_timeout: Annotated[float, Range("seconds > 0", lambda x: x > 0)] = option(
        300.0, "Seconds after which a rank that does not answer ends the run."
    )
    device: str = option(
        "auto",
        '"auto" (CUDA where there is one, a Mac\'s GPU, else CPU), '
        '"cpu", "mps", "cuda" or "cuda:N".',
    )
    compile: bool = option(False, "Run the model through torch.compile.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseConfig:
    """Everything a run depends on except the task's own model and data."""

    TASK: ClassVar[str]
    """Name of the task in files: the key ``task``."""
    COMMAND: ClassVar[str]
    """The command that trains it."""
    SHORT: ClassVar[Mapping[str, str]] = {}
    """Short option name to dotted key, besides the last part of each key."""

    name: str = option("custom", "A name for the run folder.")
    precision: Policy = option(
        "auto",
        "A precision policy by name (halfstep explain lists them), or fields such as "
        "bf16-mixed,reduce=bf16; auto: what suits the device (halfstep doctor).",
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @classmethod
    def shipped(cls, given: Mapping[str, Any]) -> str:
        """Name the shipped configuration that a command starts from, given its option values."""
        raise NotImplementedError

    def filled(self, saved: Self) -> Self:
        """Fill in, when resuming, what only the first start could know, from the saved config."""
        return self
