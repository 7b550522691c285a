"""Takes a step that the Transformers Trainer captured again, by the Trainer's own loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.diagnostics.capture.captures import Finding, set_random_state_
from halfstep.diagnostics.capture.replay import (
    Captured,
    Replayed,
    compared,
    load_model_,
    read_capture,
    repeating,
    restoring,
)
from halfstep.errors import ConfigError, NonFiniteError, SpikeError
from halfstep.integrations.hf_trainer import Held, NumericsCallback, TrainerCallback
from halfstep.integrations.loop_scaler import SPIKES_KEY, LoopScaler


def replay(trainer: Any, path: Path | str) -> Replayed:
    """Take a captured step again; call it in place of ``train()``.

    The Trainer is made by the script that was captured, and attached with the same options but
    ``folder``. In another precision (``bf16=False``) the scaler begins anew. Nothing of a capture
    is unpickled, evaluated or fetched.

    Args:
        trainer: A Trainer after ``attach`` that has not trained; it is of no use afterwards.
        path: A folder in ``captures/`` of the ``folder`` that ``attach`` was given.

    Raises:
        CheckpointError: If it is no capture, is damaged, or is of another model.
        ConfigError: If the Trainer is not attached.
    """
    known = [c for c in trainer.callback_handler.callbacks if isinstance(c, NumericsCallback)]
    if not known:
        raise ConfigError("replay() of a Trainer without attach(trainer); call it first")
    captured = read_capture(path)
    scaler = known[0].scaler
    if captured.values["guarded"] and (scaler is None or scaler.spikes is None):
        raise ConfigError(
            f"{path} was captured with on_spike; attach this Trainer with the same, as a spike is "
            "only found by a Trainer that looks for it"
        )
    again = _Again(captured, trainer)
    trainer.add_callback(again)
    batches, args = captured.batches, trainer.args
    args.max_steps, args.gradient_accumulation_steps = 1, len(batches)
    args.save_strategy = args.eval_strategy = "no"
    trainer.get_train_dataloader = lambda: batches
    inner = trainer.training_step

    def training_step(model: nn.Module, inputs: Any, *rest: Any, **named: Any) -> Tensor:
        with restoring(captured):
            set_random_state_(next(again.random), trainer.args.device)
        loss: Tensor = inner(model, inputs, *rest, **named)
        return loss

    trainer.training_step = training_step
    try:
        with repeating(captured, trainer.model):
            trainer.train()
    except (NonFiniteError, SpikeError):
        if known[0].found is None:
            raise
    return again.result(known[0])


class _Again(TrainerCallback):
    """Restores the capture before the step, and compares afterwards."""

    def __init__(self, captured: Captured, trainer: Any) -> None:
        self._captured, self._trainer = captured, trainer
        self.random = iter(captured.values["random"])
        self._before: dict[str, Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put weights, buffers, optimizer and scaler back."""
        scaler = self._trainer.accelerator.scaler
        held, values = Held(self._trainer, scaler), self._captured.values
        with restoring(self._captured):
            load_model_(self._captured, held.model)
            if held.policy == self._captured.policy:
                for optimizer, saved in zip(held.optimizers, values["optimizers"], strict=True):
                    optimizer.load_state_dict(saved)
                if scaler is not None and values["state"]:
                    scaler.load_state_dict(values["state"])
            elif isinstance(scaler, LoopScaler) and scaler.spikes is not None:
                scaler.spikes.restore_(values["state"].get(SPIKES_KEY))
        self._before = {n: p.detach().clone() for n, p in held.model.named_parameters()}

    def result(self, callback: NumericsCallback) -> Replayed:
        """What the step has found."""
        loss, norm = callback.now
        applied = Finding("applied", loss, norm, torch.get_num_threads())
        found = applied if callback.found is None else callback.found
        after = dict(self._trainer.model.named_parameters())
        same = all(torch.equal(value, after[name]) for name, value in self._before.items())
        policy = Held(self._trainer, None).policy
        if callback.found is None and not math.isfinite(loss):
            raise ConfigError("replay() of a Trainer with stop_on_nonfinite=False; leave it out")
        return compared(self._captured, policy, found, unchanged=same)
