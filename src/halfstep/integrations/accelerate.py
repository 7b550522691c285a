"""halfstep's loss scaler inside Hugging Face Accelerate; ``docs/integrations.md`` is the how-to.

One line between ``Accelerator(...)`` and ``prepare``. Nothing of Accelerate is imported here and no
class of it is changed: the scaler is put where Accelerate keeps its own, and
``unscale_gradients``, which Accelerate leaves empty outside its fp16, asks the scaler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypedDict, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import ConfigError, PrecisionError
from halfstep.integrations.loop_scaler import LoopScaler
from halfstep.integrations.parameter_names import Names
from halfstep.precision.ranks import Ranks

_NEEDED = ("scaler", "scaler_handler", "mixed_precision", "distributed_type", "device",
           "unscale_gradients", "_optimizers", "_models")  # fmt: skip
_OWN_SCALER = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}


class ScaleOptions(TypedDict, total=False):
    """What :class:`halfstep.GradScaler` can be told, and ``ranks``; ``strict`` is on by default."""

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


def attach(accelerator: Any, **options: Unpack[ScaleOptions]) -> LoopScaler:
    """Put halfstep's loss scaler into an Accelerator that has not prepared an optimizer yet.

    ``backward`` then scales with it, ``clip_grad_norm_`` clips unscaled gradients,
    ``optimizer_step_was_skipped`` is right for fused optimizers too, so that prepared schedulers
    hold on skipped steps, and ``save_state`` and ``load_state`` keep all of its state.

    Args:
        accelerator: With ``mixed_precision="fp16"`` on an accelerator device; or with ``"no"`` on
            any device, where fp16 is the loop's own: ``torch.autocast``.
        options: Those of :class:`ScaleOptions`.

    Returns:
        The scaler; its ``last_step`` tells what the latest step did.

    Raises:
        ConfigError: If it is no Accelerator, has prepared an optimizer, has a scaler of halfstep's,
            or was given ``GradScalerKwargs``.
        PrecisionError: If its precision or its engine leaves no room for a loss scaler, or an
            option cannot be honoured. Nothing is changed then.
    """
    _check(accelerator)
    ranks = options.pop("ranks", None)
    if options.get("init_scale") == "auto" and _kind(accelerator) == "FSDP":
        raise PrecisionError(
            "init_scale='auto' cannot be honoured under FSDP: its trial backwards would reduce "
            "gradients. Give a number; 2.0**16 is the default"
        )
    scaler = LoopScaler(accelerator.device.type, **{"strict": True, **options})
    scaler.bind(
        lambda: [_bare(optimizer) for optimizer in accelerator._optimizers],
        lambda: _named_parameters(accelerator._models),
        ranks,
    )

    def unscale_gradients(optimizer: Any = None) -> None:
        """Unscale the gradients of the given optimizers; of all that wait for a step, if None."""
        if optimizer is None:
            scaler.unscale_all_()
            return
        for one in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            scaler.unscale_(_bare(one))

    accelerator.scaler = scaler
    accelerator.unscale_gradients = unscale_gradients
    return scaler


def refuse_engine(accelerator: Any) -> None:
    """Refuse engines that scale the loss themselves.

    Raises:
        PrecisionError: Naming the engine.
    """
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


def _check(accelerator: Any) -> None:
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
    if precision not in ("fp16", "no"):
        raise PrecisionError(
            f"mixed_precision={precision!r} takes no loss scale of ours: bf16 has the range of "
            "fp32, and fp8 recipes scale by tensor; allowed: 'fp16', or 'no' with an autocast of "
            "your own. Leave attach() out"
        )
    if precision == "fp16" and device == "cpu":
        raise PrecisionError(
            "mixed_precision='fp16' on a CPU: Accelerate trains in fp32 there and does not say so; "
            "allowed: mixed_precision='no' with torch.autocast('cpu', torch.float16) around the "
            "forward, or halfstep.Precision('fp16-mixed', ...), see docs/integrations.md"
        )


def _bare(optimizer: Any) -> Optimizer:
    """Out of Accelerate's wrappers, of which there may be several."""
    while hasattr(optimizer, "step_was_skipped"):
        optimizer = optimizer.optimizer
    bare: Optimizer = optimizer
    return bare


def _named_parameters(models: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Names as the user's modules have them; with the model's number where there are several."""
    for number, model in enumerate(models):
        prefix = f"model {number}: " if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            for wrapper in ("_orig_mod.", "_fsdp_wrapped_module."):
                name = name.replace(wrapper, "")
            yield prefix + name.removeprefix("module."), parameter
