"""halfstep's loss scaler inside Hugging Face Accelerate; ``docs/integrations.md`` is the how-to.

Call :func:`attach` between ``Accelerator(...)`` and ``prepare``. This file does not import
Accelerate or change its classes: the scaler replaces Accelerate's own, and three methods of the
single Accelerator object are replaced::

    unscale_gradients   asks the scaler; in Accelerate it does nothing outside fp16
    prepare_optimizer   refuses 16-bit weights whose small updates would be lost
    free_memory         also makes the scaler release optimizers and parameters

bf16 needs no scale: :class:`~halfstep.integrations.loop_scaler.FiniteGuard` is used there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict, Unpack

from torch import Tensor
from torch.optim import Optimizer

from halfstep.diagnostics.lost_updates import bare_optimizer
from halfstep.errors import ConfigError, PrecisionError
from halfstep.integrations.loop_scaler import FiniteGuard, LoopScaler
from halfstep.integrations.optimizer_tensors import Names, refuse_pure
from halfstep.precision.agreement import AnyRanks
from halfstep.precision.policy.rules import plain_name

_OWN_SCALER = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}


class ScaleOptions(TypedDict, total=False):
    """The options of :class:`halfstep.GradScaler`; here ``strict`` is on by default."""

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    strict: bool
    names: Names | None
    """Parameter names for messages; None: the prepared models' own."""
    ranks: AnyRanks | None
    """The ranks that must agree on a skip, as for :class:`halfstep.GradScaler`."""
    allow_pure: bool
    """Allow 16-bit weights under any optimizer, although small updates are lost."""


def attach(
    accelerator: Any,
    *,
    scaler: bool | None = None,
    **options: Unpack[ScaleOptions],
) -> LoopScaler:
    """Put halfstep's loss scaler into an Accelerator that has not yet prepared an optimizer.

    ``backward`` then scales with halfstep's scaler (by 1 in bf16, where a step that is not finite
    stops the run), ``clip_grad_norm_`` clips unscaled gradients, ``optimizer_step_was_skipped`` is
    correct for fused optimizers too, so that prepared schedulers hold on skipped steps, and
    ``save_state`` and ``load_state`` include the scaler's state.

    Args:
        accelerator: An Accelerator with ``mixed_precision="bf16"`` on any device, ``"fp16"`` on an
            accelerator device, or ``"no"`` on any device if the loop uses its own autocast.
        scaler: Whether the loss is scaled. None: yes, unless ``mixed_precision="bf16"``. Pass False
            for ``"no"`` with an autocast in bf16, or without one.
        options: Those of :class:`ScaleOptions`.

    Returns:
        The scaler; its ``last_step`` says what the latest step did.

    Raises:
        ConfigError: If it is not an Accelerator, has prepared an optimizer, already has a scaler of
            halfstep's or ``GradScalerKwargs``, or if scale options are given without a scale.
        PrecisionError: If its precision or engine does not allow a scaler, or an option cannot be
            honoured. Nothing is changed then; ``prepare`` raises it for 16-bit weights.
    """
    scaled = _check(accelerator, scaler)
    device = accelerator.device.type
    made: LoopScaler
    if scaled:
        made = LoopScaler(device, **{"strict": True, **options})
    else:
        refuse_scale_options(accelerator, options)
        made = FiniteGuard(device, **options)
    _Attachment(accelerator, made).install()
    return made


def refuse_scale_options(accelerator: Any, options: Mapping[str, Any]) -> None:
    """Refuse options of a loss scale where there is none."""
    scales = sorted({*options} - {"names", "ranks", "allow_pure"})
    if scales:
        raise ConfigError(
            f"attach() got {', '.join(scales)}, but there is no loss scale: "
            f"mixed_precision={accelerator.mixed_precision!r}. Leave them out, or say scaler=True "
            "with an fp16 autocast of your own"
        )


class _Attachment:
    def __init__(self, accelerator: Any, scaler: LoopScaler) -> None:
        self.accelerator = accelerator
        self.scaler = scaler

    def install(self) -> None:
        self.scaler.bind(self.optimizers, self.named_parameters)
        self.accelerator.scaler = self.scaler
        for name in ("unscale_gradients", "prepare_optimizer", "free_memory"):
            setattr(self.accelerator, name, getattr(self, name))

    def optimizers(self) -> list[Optimizer]:
        """The loop's optimizers, without Accelerate's wrappers."""
        return [bare_optimizer(optimizer) for optimizer in self.accelerator._optimizers]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters of all prepared models by the user's names, with the model's number."""
        models = self.accelerator._models
        for number, model in enumerate(models):
            prefix = f"model {number}: " if len(models) > 1 else ""
            for name, parameter in model.named_parameters():
                yield prefix + plain_name(name.replace("_fsdp_wrapped_module.", "")), parameter

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of the given optimizers; if None, of all that await a step."""
        if optimizer is None:
            self.scaler.unscale_all_()
            return
        for one in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            self.scaler.unscale_(bare_optimizer(one))

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer as Accelerate does, after a check for 16-bit weights.

        Raises:
            PrecisionError: For trainable 16-bit weights.
        """
        widens = _kind(self.accelerator) == "FSDP"  # the weights, when it shards them
        if not (widens or self.scaler._allow_pure):
            names = self.scaler._names or {p: name for name, p in self.named_parameters()}
            refuse_pure(bare_optimizer(optimizer), names)
        kind: Any = type(self.accelerator)
        return kind.prepare_optimizer(self.accelerator, optimizer, device_placement)

    def free_memory(self, *objects: Any) -> Any:
        """Free memory as Accelerate does, and make the scaler release its references, too."""
        kind: Any = type(self.accelerator)
        freed = kind.free_memory(self.accelerator, *objects)
        self.scaler.release()
        return freed


def refuse_engine(accelerator: Any) -> None:
    """Refuse engines that scale the loss themselves; the error names the engine."""
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
    if not hasattr(accelerator, "scaler_handler"):
        raise ConfigError(
            f"attach() got a {type(accelerator).__name__} without scaler_handler; allowed: an "
            "accelerate.Accelerator"
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
            f"mixed_precision={precision!r} scales each tensor by a recipe of its own; allowed: "
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
