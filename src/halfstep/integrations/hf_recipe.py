"""Recipes below 16 bits inside the Transformers Trainer, whose autocast is bf16.

The model's linear layers multiply as the policy says; everything else is the Trainer's own. Random
bits and schedules depend on the step, which the Trainer's state says, also after a resume.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halfstep.errors import PrecisionError
from halfstep.precision.casting.autocast import require_support
from halfstep.precision.casting.cast import add_regions_
from halfstep.precision.low_bit.clock import Clock, make_clock
from halfstep.precision.masters.portable import make_modules_portable_
from halfstep.precision.ownership import is_ours
from halfstep.precision.policy.policy import POLICIES
from halfstep.precision.policy.recipe import Recipe
from halfstep.precision.policy.rules import PlacedModel, place
from halfstep.precision.policy.spelling import parse_policy


def place_recipe(trainer: Any, policy: str) -> tuple[PlacedModel, Clock]:
    """Find which linear layers of a Trainer's model multiply below 16 bits; changes nothing.

    Args:
        trainer: A Trainer with ``bf16=True``.
        policy: ``bf16-mixed`` with a recipe, such as ``"mxfp8,simulate=yes"``.

    Returns:
        The placed model, for :func:`apply_recipe_`, and its layers' clock, which the Trainer's
        steps must set.

    Raises:
        PrecisionError: If policy, device, Trainer and model are not compatible.
    """
    value = parse_policy(policy, trainer.args.device)
    base = replace(value, recipe=Recipe(), simulate=False, schedule=(), rules=())
    if not value.recipes() or base != POLICIES["bf16-mixed"]:
        raise PrecisionError(
            f"attach(policy={policy!r}); allowed: bf16-mixed with a recipe, such as "
            "'mxfp8,simulate=yes'. Other policies are the Trainer's own bf16 and fp16, and for "
            "16-bit weights an optimizer of halfstep.optim"
        )
    mixed = trainer.accelerator.mixed_precision
    if mixed != "bf16":
        raise PrecisionError(
            f"attach(policy={policy!r}) rounds the operands of bf16 products, and this Trainer "
            f"trains with mixed_precision={mixed!r}; set TrainingArguments(bf16=True)"
        )
    delayed = [scheme.name for scheme in value.schemes() if scheme.history]
    if delayed:
        raise PrecisionError(
            f"{delayed[0]} scales by the steps before, and the Trainer's checkpoints have no place "
            f"for them; use {delayed[0].removesuffix('-delayed')}, or halfstep.Precision"
        )
    if trainer.args.n_gpu > 1:
        raise PrecisionError(
            f"attach(policy={policy!r}) with {trainer.args.n_gpu} GPUs in one process, where the "
            "Trainer uses torch.nn.DataParallel, which copies layers at each call; start it by "
            "torchrun, or show it one GPU"
        )
    require_support(value, trainer.args.device)
    return place(value, trainer.model), make_clock(value, steps=1)


def apply_recipe_(placed: PlacedModel, clock: Clock) -> None:
    """Make the layers multiply below 16 bits."""
    add_regions_(placed, clock)
    make_modules_portable_(placed.model, is_ours)
