"""A micro-batch of a step, and an evaluation, of a model that gives (loss sum, count)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import halfstep.optim as optim
from halfstep.errors import DataError
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.step import Precision
from halfstep.trainer.config.run import OptimizerConfig, ScheduleConfig

Batch = Any
"""A micro-batch as a task returns it: tensors, in tuples, lists or dicts."""
LossSum = Callable[[Any], tuple[Tensor, Tensor]]


def run_micro_batch(
    loss_sum: LossSum,
    precision: Precision,
    batch: Batch,
    n: float,
    seed: int | None,
    between: Callable[[], None] | None = None,
) -> None:
    """Run forward and backward of a micro-batch, whose loss is divided by ``n``."""
    if seed is not None:
        seed_dropout(seed)
    with precision.autocast():
        total, _ = loss_sum(to_device(batch, precision.device))
        loss = total / n
    if between is not None:
        between()
    precision.backward(loss)


def seed_dropout(seed: int) -> None:
    """Seed the generators that dropout draws from, on the CPU and on GPUs in use.

    ``torch.manual_seed`` would take longer than the step of a tiny model: for each kind of device
    that is not in use it formats a traceback, for an error that may come when the device is.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the batch to the device; for CUDA asynchronously, from pinned memory."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Mapping):
        batch = dict(batch)  # pytree knows few kinds of it

    def moved(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    return tree_map_only(Tensor, moved, batch)


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """A rank's micro-batches of a step, with a dropout seed for each."""

    batches: list[Batch]
    seeds: list[int]
    targets: float
    """What they add to the divisor of the loss; counted on the host."""


class Ahead:
    """Makes the micro-batches of each step; for CUDA a step ahead, so that copies cost no time.

    ``make`` must depend on the step alone. So there is no position to save: a run that ends drops
    what was made ahead, and a resumed one makes the same again.
    """

    def __init__(self, make: Callable[[int], MicroBatches], device: torch.device) -> None:
        """Make nothing yet; ``make`` returns a step's micro-batches on the host."""
        self._make, self._device = make, device
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._next: tuple[int, MicroBatches] | None = None

    def take(self, step: int) -> MicroBatches:
        """Return the micro-batches of a step, on the device."""
        number, made = self._next or (-1, None)
        self._next = None
        if made is None or number != step:
            made = self._made(step)
        if self._copies is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_stream(self._copies)
            # their memory is of the other stream, which must not reuse it before this one is done
            tree_map_only(Tensor, lambda t: t.record_stream(stream), made.batches)
        return made

    def prepare(self, step: int) -> None:
        """Make the micro-batches of a later step while the device works on this one."""
        if self._copies is not None:
            self._next = step, self._made(step)

    def _made(self, step: int) -> MicroBatches:
        made = self._make(step)
        if self._copies is None:
            return made
        with torch.cuda.stream(self._copies):
            here = [to_device(batch, self._device) for batch in made.batches]
        return replace(made, batches=here)


# The optimizer and its learning rate, by name.


OWN = {"adamw": "AdamW", "sgd": "SGD", "lion": "Lion", "muon": "Muon"}
"""The name of each of halfstep's optimizers to that of its class, loaded when it is asked for."""
_TORCH = {name.lower(): name for name in torch.optim.__all__}
_FUSED = {"adam", "adamw", "sgd"}  # torch has a fused kernel on CPU and CUDA alike


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, policy: PrecisionPolicy, *, seed: int = 0
) -> Optimizer:
    """Make the optimizer that a configuration names, over the trainable parameters.

    Tensors of two or more dimensions (matrices, embeddings) decay; vectors (norms, biases) do not.
    An optimizer gets the hyperparameters that its class takes: SGD and RMSprop take ``beta1`` as
    momentum, RMSprop takes ``beta2`` as alpha. halfstep's own is used where no other keeps weights
    and moments as the policy says, torch's elsewhere. ``seed`` is that of stochastic rounding.

    **Source:** Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; the
    split by dimension as in GPT-3 training code published since (nanoGPT, llm.c).
    """
    if config.name == "muon":  # ours in every policy, as torch's takes matrices only
        return optim.Muon(
            optim.muon_groups(model, eps=config.eps),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",  # one rate suits matrices and AdamW
            betas=(config.beta1, config.beta2),
            seed=seed,
        )
    trainable = [p for p in model.parameters() if p.requires_grad]
    every = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in every if group["params"]]
    own = config.name in OWN and (policy.needs_own_optimizer or config.name not in _TORCH)
    make: Callable[..., Optimizer] = (
        getattr(optim, OWN[config.name]) if own else getattr(torch.optim, _TORCH[config.name])
    )
    offered = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "momentum": config.beta1,
        "eps": config.eps,
        "seed": seed,
    }
    taken = inspect.signature(make).parameters
    arguments: dict[str, Any] = {name: value for name, value in offered.items() if name in taken}
    if config.name == "rmsprop":  # ASGD has an alpha too, with another meaning
        arguments["alpha"] = config.beta2
    if not own and config.name in _FUSED:
        arguments["fused"] = True
    return make(groups, **arguments)


def learning_rate(peak: float, schedule: ScheduleConfig, applied: int, max_steps: int) -> float:
    """Compute the learning rate of the next step, after ``applied`` steps that moved the weights.

    **Source:** cosine: Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts.
    """
    if applied < schedule.warmup_steps:
        return peak * (applied + 1) / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    start = schedule.warmup_steps
    progress = min(max(applied - start, 0) / max(max_steps - start, 1), 1.0)
    floor = schedule.min_ratio
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.decay == "cosine" else 1 - progress
    return peak * (floor + (1 - floor) * left)


# The loss on validation data, in the training precision, over all ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of one evaluation.

    Attributes:
        loss: Mean negative log-likelihood in nats per target (a token, or a classifier's example).
        targets: Number of targets that the loss is the mean of.
        score: The value compared to find the best evaluation; higher is better.
        text: The result as a line of text for the user.
        bits_per_byte: The loss in bits per UTF-8 byte of text: comparable between tokenizers. None
            where the bytes behind the tokens are not known.
        accuracy: Share of examples whose class was predicted; None where there are no classes.
        macro_f1: Unweighted mean of the F1 score of each class.
        confusion: Number of examples by true class (row) and predicted class (column); may be ().
        measures: Further values that the user's own function measured, by name.
    """

    loss: float
    targets: int
    score: float
    text: str
    bits_per_byte: float | None = None
    accuracy: float | None = None
    macro_f1: float | None = None
    confusion: tuple[tuple[int, ...], ...] = ()
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judge:
    """How a rank evaluates: its share of the rows, its precision, and how ranks are summed."""

    loss_sum: LossSum
    """The model's loss, compiled where asked."""
    around: Callable[[], AbstractContextManager[None]]
    """Returns the context manager of a forward pass in the training precision."""
    device: torch.device
    rank: int = 0
    """This rank's index among the ranks that have different rows."""
    ranks: int = 1
    sum: Callable[[Sequence[float]], list[float]] = list
    """Sums each value over the ranks in fp64; every rank gets the same result."""


def perplexity(loss: float) -> float:
    """Return the exponential of a loss in nats per token; infinity where fp64 overflows."""
    return math.exp(loss) if loss < 700 else math.inf


@torch.no_grad()
def mean_loss(batches: Iterable[Batch], judge: Judge) -> tuple[float, int]:
    """Return the mean loss over all ranks' batches, and the number of targets in it.

    The model must be in evaluation mode already. Sums are kept in fp64 on the device, for which
    the host waits once.

    Raises:
        DataError: If there is no target at all.
    """
    sums = torch.zeros(())  # of no dims, it adds to a tensor of any device
    with judge.around():
        for batch in batches:
            found = judge.loss_sum(to_device(batch, judge.device))
            sums = sums + torch.stack([each.double() for each in found])
    total, count = judge.sum(sums.expand(2).tolist())
    if not count:
        raise DataError("the validation data has no target token; give more data with --val-data")
    return total / count, round(count)


def evaluate(batches: Iterable[Batch], judge: Judge, density: float) -> Evaluation:
    """Measure the loss per token, and per byte of a text of ``density`` tokens a byte.

    Raises:
        DataError: If there is no target at all.
    """
    loss, targets = mean_loss(batches, judge)
    bits = loss / math.log(2) * density
    text = f"validation loss {loss:.4f} nats per token, {bits:.4f} bits per byte"
    return Evaluation(loss=loss, targets=targets, score=-loss, text=text, bits_per_byte=bits)
