"""The configuration that runs of every task share, and how tables and words become its values.

Imports no torch, so that ``--help`` is quick.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)  # fmt: skip

from halfstep.errors import ConfigError
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
    grad_accum: AtLeast1 = option(
        1, "Micro-batches that one step's batch is split into; divides batch_size."
    )
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
    checkpoint_dir: str = option(
        "",
        "Folder or URL of this run's checkpoints, such as s3://bucket/run or memory://run (by "
        "fsspec); empty: checkpoints/ in the run folder.",
    )
    second_dir: str = option(
        "", "Folder or URL for checkpoints that cannot be written to the first one; empty: none."
    )
    save_deadline: Amount = option(
        1800.0,
        "Seconds for which training goes on though no checkpoint can be written; then the run ends "
        "with code 75. 0: at once.",
    )
    parallel: Parallel = option(
        "",
        'Sizes of the mesh axes that ranks share the work on, of "data=2,shard=2,tensor=2" any '
        "(docs/distributed.md); empty: data over all ranks.",
    )
    rank_timeout: Annotated[float, Range("seconds > 0", lambda x: x > 0)] = option(
        300.0, "Seconds after which a rank that does not answer ends the run."
    )
    device: str = option(
        "auto",
        '"auto" (CUDA where there is one, else CPU), "cpu", "cuda" or "cuda:N".',
    )
    compile: Literal["auto", "yes", "no"] = option(
        "auto",
        "Run the model through torch.compile; auto: on CUDA, in runs long enough to gain by it "
        "(docs/training.md); --compile alone: yes.",
        bare="yes",
    )

    def __post_init__(self) -> None:
        for key in ("output_dir", "checkpoint_dir", "second_dir"):
            url, allowed = getattr(self, key), ", or a URL with a path, such as s3://bucket/run"
            if "://" in url and (key == "output_dir" or not url.rpartition("://")[2].strip("/")):
                allowed = "" if key == "output_dir" else allowed
                raise ConfigError(f"run.{key}={url}; allowed: a folder{allowed}")
        if self.batch_size % self.grad_accum:  # an evaluation would have other windows
            raise ConfigError(
                f"run.batch_size={self.batch_size} cannot be split into run.grad_accum="
                f"{self.grad_accum} equal micro-batches"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseConfig:
    """Everything a run depends on except the task's own model and data."""

    TASK: ClassVar[str]
    """Name of the task in files: the key ``task``."""
    COMMAND: ClassVar[str]
    """The command that trains it."""
    SHORT: ClassVar[dict[str, str]] = {"optimizer": "optimizer.name"}
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


# From TOML tables and command lines to such dataclasses.


_KINDS = {
    "int": "an integer",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a string",
}
"""A type to what a user may write for it."""


def build(
    cls: type[Any],
    table: Any,
    path: str = "",
    named: Callable[[str], str] = "key {}".format,
    unknown: dict[str, Any] | None = None,
) -> Any:
    """Build a dataclass, and the dataclasses in its fields, from a nested mapping.

    Args:
        cls: A dataclass.
        table: Field name to value or section; strings are converted to the field's type.
        path: Prefix of the table's keys in error messages: ``""``, or ``"section."``.
        named: Formats a dotted key for error messages.
        unknown: Takes the keys that no field has; if None, such a key is refused.

    Raises:
        ConfigError: For an unknown or missing key, or a value of another type.
    """
    if not isinstance(table, Mapping):
        where = named(path.rstrip("."))
        raise ConfigError(f"{where}: {shown(table)} given, a section is expected")
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls)]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in names and unknown is not None:
            unknown[path + key] = value
            continue
        if key not in names:
            hint, allowed = did_you_mean(key, names), ", ".join(names)
            raise ConfigError(f"unknown key {path}{key:.80}{hint}; allowed: {allowed}")
        if is_dataclass(hints[key]):
            values[key] = build(hints[key], value, f"{path}{key}.", named, unknown)
        else:
            values[key] = found = _convert(value, hints[key], named(path + key))
            ranges = getattr(hints[key], "__metadata__", ())
            if ranges and not ranges[0].holds(found):
                raise ConfigError(f"{path}{key}={found}; allowed: {ranges[0].allowed}")
    for f in fields(cls):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values:
            raise ConfigError(f"{named(path + f.name)} is missing")
    return cls(**values)


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (UnionType, Annotated):  # X | None, or X in a range
        return _convert(value, parts[0], where)
    if origin is Literal:
        if "yes" in parts:  # what has become a choice was true or false before
            value = {"true": "yes", "false": "no"}.get(str(value).lower(), value)
        if value in parts:
            return value
        allowed = ", ".join(str(choice) or "''" for choice in parts)
        raise _refused(value, where, allowed)
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, Sequence):
            raise _refused(value, where, "a list of strings")
        return tuple(_convert(item, parts[0], where) for item in items)
    try:
        return _scalar(value, hint)
    except (ValueError, TypeError, OverflowError):
        raise _refused(value, where, _KINDS[hint.__name__]) from None


def _refused(value: Any, where: str, allowed: str) -> ConfigError:
    return ConfigError(f"{where}: {shown(value)}; allowed: {allowed}")


def _scalar(value: Any, hint: Any) -> Any:
    if hint is bool and isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower())
    if hint in (int, float) and not isinstance(value, bool):
        number = hint(value)
        if math.isfinite(number) and (isinstance(value, str) or number == value):
            return number
    elif type(value) is hint:
        return value
    raise ValueError


def shown(value: Any) -> str:
    """Represent any value in an error message, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-17:]}"


def did_you_mean(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Suggest the known name closest to a misspelt one; empty if none is close."""
    close = difflib.get_close_matches(word[:100], list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
