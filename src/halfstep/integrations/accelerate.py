"""halfstep's loss scaler inside Hugging Face Accelerate; ``docs/integrations.md`` is the how-to.

One line between ``Accelerator(...)`` and ``prepare``. Nothing of Accelerate is imported here and no
class of it is changed: the scaler is put where Accelerate keeps its own, and four methods of the
one Accelerator ask us first::

    unscale_gradients   which Accelerate leaves empty outside its fp16, asks the scaler
    prepare_optimizer   refuses 16-bit weights of which nothing keeps the small updates
    load_state          takes up states that were saved before there was a scaler
    free_memory         lets the scaler forget optimizers and parameters, too

In bf16 there is no scale: :class:`~halfstep.integrations.loop_scaler.FiniteGuard` stands there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Literal, TypedDict, Unpack

from torch import Tensor
from torch.optim import Optimizer

from halfstep.diagnostics.lost_updates.meter import LostUpdateMeter
from halfstep.errors import ConfigError, PrecisionError
from halfstep.integrations.grad_scaler.parameter_names import Names
from halfstep.integrations.loop_scaler import FiniteGuard, LoopScaler
from halfstep.precision.scaling.gradients import Ranks

_NEEDED = ("scaler", "scaler_handler", "mixed_precision", "distributed_type", "device",
           "unscale_gradients", "prepare_optimizer", "load_state", "free_memory", "_optimizers",
           "_models")  # fmt: skip
_OWN_SCALER = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}
_SCALER_FILE = "scaler.pt"  # where save_state keeps the scaler's state


class ScaleOptions(TypedDict, total=False):
    """What :class:`halfstep.GradScaler` can be told; ``strict`` is on by default."""

    init_scale: float | Literal["auto"]
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    strict: bool
    min_scale: float | None
    max_scale: float | None
    hysteresis: int
    max_consecutive_skips: int | None
    names: Names | None
    """For messages; None: the prepared models' own."""
    ranks: Ranks | None
    """Who must agree on a skip; None: all of ``torch.distributed``'s default group."""
    allow_pure: bool
    """Train 16-bit weights under any optimizer, with nothing behind them."""


def attach(
    accelerator: Any,
    *,
    scaler: bool | None = None,
    on_nonfinite: str = "stop",
    lost_updates_every: int = 50,
    **options: Unpack[ScaleOptions],
) -> LoopScaler:
    """Let an Accelerator that has not prepared an optimizer yet account for its steps.

    ``backward`` then scales with halfstep's scaler (by 1 in bf16), ``clip_grad_norm_`` clips
    unscaled gradients, ``optimizer_step_was_skipped`` is right for fused optimizers too, so that
    prepared schedulers hold on skipped steps, and ``save_state`` and ``load_state`` keep all of its
    state.

    Args:
        accelerator: With ``mixed_precision="bf16"`` on any device, ``"fp16"`` on an accelerator
            device; or ``"no"`` on any device, with an autocast of the loop's own.
        scaler: Whether the loss is scaled. None: unless ``mixed_precision="bf16"``. False for
            ``"no"`` with an autocast in bf16, or none.
        on_nonfinite: Without a scale: ``"stop"``, or ``"skip:K"`` to leave up to K steps in a row
            out whose loss or gradients are not finite.
        lost_updates_every: Measure lost updates on every this many applied steps; 0: never.
        options: Those of :class:`ScaleOptions`.

    Returns:
        The scaler; its ``last_step`` tells what the latest step did, its ``meter`` which updates
        were lost.

    Raises:
        ConfigError: If it is no Accelerator, has prepared an optimizer, has a scaler of halfstep's,
            was given ``GradScalerKwargs``, or if options of a scale come without one.
        PrecisionError: If its precision or its engine leaves no room for it, or an option cannot be
            honoured. Nothing is changed then; ``prepare`` raises it for 16-bit weights.
    """
    scaled = _check(accelerator, scaler)
    if options.get("init_scale") == "auto" and _kind(accelerator) == "FSDP":
        raise PrecisionError(
            "init_scale='auto' cannot be honoured under FSDP: its trial backwards would reduce "
            "gradients. Give a number; 2.0**16 is the default"
        )
    made = _make(accelerator, scaled, on_nonfinite, options)
    _Attachment(accelerator, made, lost_updates_every).install()
    return made


def _make(accelerator: Any, scaled: bool, on_nonfinite: str, options: ScaleOptions) -> LoopScaler:
    device = accelerator.device.type
    if scaled:
        if on_nonfinite != "stop":
            raise ConfigError(
                f"on_nonfinite={on_nonfinite!r} is for loops without a loss scale; a scale answers "
                "overflows by skipping, up to max_consecutive_skips"
            )
        return LoopScaler(device, **{"strict": True, **options})
    plain: dict[str, Any] = {
        key: value for key, value in options.items() if key in ("names", "ranks", "allow_pure")
    }
    if len(plain) < len(options):
        raise ConfigError(
            f"attach() got {', '.join(sorted({*options} - {*plain}))}, but there is no loss scale: "
            f"mixed_precision={accelerator.mixed_precision!r}, scaler=False. Leave them out"
        )
    return FiniteGuard(device, on_nonfinite=on_nonfinite, **plain)


class _Attachment:
    """What an Accelerator calls in place of its own methods; copied and pickled along with it."""

    def __init__(self, accelerator: Any, scaler: LoopScaler, every: int) -> None:
        self.accelerator = accelerator
        self.scaler = scaler
        self.every = every

    def install(self) -> None:
        """Put the scaler and the methods in place."""
        self.scaler.bind(self.optimizers, self.named_parameters)
        self.accelerator.scaler = self.scaler
        for name in ("unscale_gradients", "prepare_optimizer", "load_state", "free_memory"):
            setattr(self.accelerator, name, getattr(self, name))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The scaler of a copy is bound to the copied loop."""
        self.__dict__.update(state)
        self.scaler.bind(self.optimizers, self.named_parameters)

    def optimizers(self) -> list[Optimizer]:
        """Those that step in the loop, unwrapped."""
        return [bare(optimizer) for optimizer in self.accelerator._optimizers]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Of all prepared models, as the user's modules name them; with the model's number."""
        models = self.accelerator._models
        for number, model in enumerate(models):
            prefix = f"model {number}: " if len(models) > 1 else ""
            for name, parameter in model.named_parameters():
                for wrapper in ("_orig_mod.", "_fsdp_wrapped_module."):
                    name = name.replace(wrapper, "")
                yield prefix + name.removeprefix("module."), parameter

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of the given optimizers; of all that wait for a step, if None."""
        if optimizer is None:
            self.scaler.unscale_all_()
            return
        for one in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            self.scaler.unscale_(bare(one))

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As Accelerate's, for an optimizer whose updates are kept.

        Raises:
            PrecisionError: For trainable 16-bit weights, as :meth:`halfstep.GradScaler.check`.
        """
        if _kind(self.accelerator) != "FSDP":  # which widens the weights when it shards them
            known = self.scaler._names
            self.scaler._names = known or {p: name for name, p in self.named_parameters()}
            try:
                self.scaler.check(bare(optimizer))
            finally:
                self.scaler._names = known
        kind: Any = type(self.accelerator)
        ready = kind.prepare_optimizer(self.accelerator, optimizer, device_placement)
        if self.every:
            self.scaler.close_meter()
            self.scaler.meter = LostUpdateMeter(self.optimizers(), self.every)
        return ready

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's; the scaler lets go of what it knows, too."""
        kind: Any = type(self.accelerator)
        freed = kind.free_memory(self.accelerator, *objects)
        self.scaler.release()
        return freed

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's; a state without a scaler is taken up, and the scaler starts anew."""
        accelerator, kind = self.accelerator, type(self.accelerator)
        try:
            kind.load_state(accelerator, *args, **kwargs)
        except FileNotFoundError as error:
            if _SCALER_FILE not in str(error):
                raise
            warnings.warn(
                f"the saved state has no {_SCALER_FILE}: it was saved before attach(), and the "
                "scaler's counts start from 0", stacklevel=2,
            )  # fmt: skip
            accelerator.scaler = None
            try:
                kind.load_state(accelerator, *args, **kwargs)
            finally:
                accelerator.scaler = self.scaler


def refuse_engine(accelerator: Any) -> None:
    """Refuse engines that scale the loss themselves, by name."""
    engine = _OWN_SCALER.get(_kind(accelerator))
    if engine is not None:
        raise PrecisionError(
            f"attach() cannot be honoured under {engine}, which scales the loss and skips steps "
            "itself; allowed: one process, DDP, FSDP. Use halfstep.trace_nonfinite for diagnosis "
            f"there, or leave {engine} out"
        )


def _kind(accelerator: Any) -> str:
    kind = accelerator.distributed_type
    return str(getattr(kind, "name", kind))


def _check(accelerator: Any, scaler: bool | None) -> bool:
    """Refuse what cannot be; whether the loss is scaled."""
    missing = [name for name in _NEEDED if not hasattr(accelerator, name)]
    if missing:
        raise ConfigError(
            f"attach() got a {type(accelerator).__name__} without {', '.join(missing)}; allowed: "
            "an accelerate.Accelerator, of version 1.10 or newer"
        )
    refuse_engine(accelerator)
    if isinstance(accelerator.scaler, LoopScaler):
        raise ConfigError("attach() was called for this Accelerator already; call it once")
    if accelerator._optimizers:
        raise ConfigError(
            "attach() came after prepare(): the prepared optimizers hold another scaler already. "
            "Call it right after Accelerator(...), before prepare"
        )
    if accelerator.scaler_handler is not None:
        raise ConfigError(
            "the Accelerator was given GradScalerKwargs, and attach() has options of its own: two "
            "answers to one question. Leave GradScalerKwargs out and give attach() init_scale, "
            "growth_factor, backoff_factor and growth_interval"
        )
    precision, device = accelerator.mixed_precision, accelerator.device.type
    if precision not in ("fp16", "bf16", "no"):
        raise PrecisionError(
            f"mixed_precision={precision!r} scales by tensor in recipes of its own; allowed: "
            "'bf16', 'fp16', or 'no' with an autocast of your own. Leave attach() out"
        )
    if precision == "fp16" and device == "cpu":
        raise PrecisionError(
            "mixed_precision='fp16' on a CPU: Accelerate trains in fp32 there and does not say so; "
            "allowed: mixed_precision='no' with torch.autocast('cpu', torch.float16) around the "
            "forward, or halfstep.Precision('fp16-mixed', ...), see docs/integrations.md"
        )
    needed = {"fp16": True, "bf16": False}.get(precision, scaler)
    if scaler not in (None, needed):
        raise PrecisionError(
            f"scaler={scaler} with mixed_precision={precision!r}: fp16 needs a loss scale, and "
            f"bf16 has the range of fp32; say scaler={needed}, or leave it out"
        )
    return precision != "bf16" if scaler is None else scaler


def bare(optimizer: Any) -> Optimizer:
    """Out of Accelerate's wrappers, of which there may be several."""
    while hasattr(optimizer, "step_was_skipped"):
        optimizer = optimizer.optimizer
    unwrapped: Optimizer = optimizer
    return unwrapped
