"""Why a Trainer's step was not taken: which micro-batch, which parameters, which operation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.diagnostics.first_cause import trace_nonfinite
from halfstep.errors import NonFiniteError
from halfstep.precision.checks import some
from halfstep.precision.gradients import find_nonfinite
from halfstep.precision.local import local_part
from halfstep.precision.ranks import OneRank, ranks_of_this_process


def stopped(
    trainer: Any,
    step: int,
    micro: Sequence[tuple[Tensor, Any]],
    values: Sequence[float],
    *,
    of_loss: bool,
) -> NonFiniteError:
    """The error for a step that cannot be right, with its first cause where it can be found.

    Args:
        trainer: A ``transformers.Trainer`` before its optimizer's step; its gradients are cleared.
        step: The step's number, from 1.
        micro: Loss and inputs of each micro-batch.
        values: The losses as numbers, and the norm of the gradients.
        of_loss: Whether a loss is what is not finite, on some rank.
    """
    named = dict(trainer.model.named_parameters())
    weights = find_nonfinite((n, local_part(p)) for n, p in named.items()).names
    broken = _broken_gradients(named)
    trainer.model.zero_grad()
    index = next((i for i, v in enumerate(values[:-1]) if not math.isfinite(v)), None)
    told = ""
    if not weights:
        again = [micro[index]] if of_loss and index is not None else micro
        told, anew = _run_again(trainer, again, named)
        broken = anew or broken  # before clipping, which spreads a NaN over all gradients
    if of_loss:
        what = _which_loss(values[:-1], index)
        source = "the forward pass or the data made it, no loss scale can help"
    else:
        what = f"the norm of the gradients is {values[-1]} with a finite loss"
        source = f"not finite in {some(broken) or 'no gradient of this rank'}"
    if weights:
        source = f"the weights {some(weights)} are not finite"
    return NonFiniteError(
        f"step {step}: {what}: {source}; the step was not taken, the weights are those after step "
        f"{step - 1}{told}",
        cause="forward" if of_loss else "gradients",
        parameters=weights if weights or of_loss else broken,
    )


def _broken_gradients(named: Mapping[str, Tensor]) -> tuple[str, ...]:
    return find_nonfinite(
        (name, local_part(p.grad)) for name, p in named.items() if p.grad is not None
    ).names


def _which_loss(losses: Sequence[float], index: int | None) -> str:
    if index is None:
        return "the loss of another rank is not finite"
    place = f" in micro-batch {index + 1} of {len(losses)}" if len(losses) > 1 else ""
    return f"the loss is {losses[index]}{place}"


def _run_again(
    trainer: Any, micro: Sequence[tuple[Tensor, Any]], named: Mapping[str, Tensor]
) -> tuple[str, tuple[str, ...]]:
    """The first cause as text, and whose gradients are not finite; empty where nothing is seen."""
    if not isinstance(ranks_of_this_process(torch.device("cpu")), OneRank):
        return "", ()  # the other ranks do not take part
    try:
        with trace_nonfinite(trainer.model) as trace:
            for _, inputs in micro:
                trainer.compute_loss(trainer.model, dict(inputs)).backward()
        broken = _broken_gradients(named)
    except Exception as error:  # a diagnosis must not hide what it is a diagnosis of
        return f". Looking for the first cause failed: {type(error).__name__}: {error}", ()
    finally:
        trainer.model.zero_grad()
    cause = trace.first_cause
    return "" if cause is None else f". First cause: {cause}", broken
