"""Takes a captured step again: in a new process, in the same precision or in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.diagnostics.capture.captures import (
    Finding,
    device_of,
    environment,
    finding,
    rank_and_size,
    read_finding,
    set_random_state_,
)
from halfstep.diagnostics.capture.sealed import read_sealed
from halfstep.errors import CheckpointError, HalfstepError, NonFiniteError, SpikeError
from halfstep.precision.policy.rules import plain_name
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.recovery import OnSpike
from halfstep.precision.scaling.gradients import Judged
from halfstep.precision.step import Precision
from halfstep.words import Phrase, Told

_told = Told("halfstep.diagnostics.capture")
_KEYS = {
    "policy": str,
    "found": dict,
    "environment": dict,
    "weights": dict,
    "buffers": dict,
    "evaluating": list,
    "optimizers": list,
    "state": dict,
    "batches": list,
    "random": list,
    "step": int,
    "guarded": bool,
    "rank": int,
    "ranks": int,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A captured step, and the same step taken again."""

    step: int
    """The step's number, as in ``metrics.jsonl``."""
    precision: str
    """The policy of the replay."""
    captured_precision: str
    captured: Finding
    found: Finding
    """What the replay found; the reason is ``"applied"`` if nothing was wrong."""
    unchanged: bool
    """Whether the weights after it are those before, bit for bit."""
    differs: str = ""
    """What the capture was made with that is different here."""

    @property
    def repeated(self) -> bool:
        """Whether the replay found the same, bit for bit; only meant in the same precision."""
        return self.unchanged and self.found.same_bits(self.captured)

    @property
    def survives(self) -> bool:
        """Whether the step could be applied."""
        return self.found.reason == "applied"

    @property
    def verdict(self) -> Phrase:
        """The result in a sentence."""
        if self.precision != self.captured_precision:
            if self.survives:
                return _told.phrase("survives", policy=self.precision)
            return _told.phrase("does_not_survive", policy=self.precision)
        if self.repeated:
            return _told.phrase("repeats")
        if self.differs:
            return _told.phrase("other_torch", differs=self.differs)
        return _told.phrase("does_not_repeat")


@dataclass(frozen=True, slots=True)
class Captured:
    """A capture in memory."""

    path: Path
    values: dict[str, Any]
    found: Finding

    @property
    def batches(self) -> Sequence[Any]:
        """The micro-batches, on the CPU."""
        return list(self.values["batches"])

    @property
    def policy(self) -> str:
        """The precision that it was captured in."""
        return str(self.values["policy"])


def read_capture(path: Path | str) -> Captured:
    """Read a capture; with several ranks, the part of this process's rank.

    Raises:
        CheckpointError: If it is none, is damaged, or was made by another number of ranks.
    """
    path = Path(path)
    parts = sorted(path.glob("rank-*")) if not path.is_symlink() else []
    if parts:
        size = rank_and_size()[1]
        if len(parts) != size:
            raise CheckpointError(
                f"{path}: a step of {len(parts)} ranks, and this is {size}: take it again with "
                f"torchrun --nproc-per-node {len(parts)}, or give {parts[0]} for the batch of one "
                "rank alone"
            )
        path = parts[rank_and_size()[0]]
    values = read_sealed(path)
    wrong = [k for k, kind in _KEYS.items() if not isinstance(values.get(k), kind)]
    if parts and values.get("ranks") != len(parts):
        wrong = [f"all of its {values.get('ranks')!s:.10} ranks"]
    found = read_finding(values.get("found"))
    if wrong or found is None or len(values["random"]) != len(values["batches"]):
        raise CheckpointError(
            f"{path}: no capture: {', '.join(wrong) or 'what it found'} cannot be read; allowed: a "
            "folder that halfstep.Recorder wrote into captures/"
        )
    return Captured(path, values, found)


def replay(
    path: Path | str,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss: Callable[[Any], Tensor],
    *,
    precision: str = "",
) -> Replayed:
    """Take a captured step of a loop of one's own again.

    The model and its optimizer are made anew, as for the first step; the capture holds everything
    else. Nothing of a capture is unpickled, evaluated or fetched.

    Args:
        path: A folder that :class:`halfstep.Recorder` wrote into ``captures/``.
        model: The same model, on its device, with any weights.
        optimizer: Its optimizer, or several, that have not stepped.
        loss: Computes a micro-batch's loss from what ``batch(...)`` was given, as in the loop;
            tensors are on the model's device.
        precision: The policy to take the step in; empty: the captured one.

    Raises:
        CheckpointError: If it is no capture, is damaged, or is of another model.
        PrecisionError: If the policy cannot be honoured here.
    """
    captured = read_capture(path)
    own = parse_policy(captured.policy)
    policy = parse_policy(precision) if precision else own
    guarded = OnSpike("stop" if captured.values["guarded"] else "off")
    engine = Precision(policy, model, optimizer, on_spike=guarded)

    def run(batch: Any) -> None:
        with engine.autocast():
            value = loss(batch)
        engine.backward(value)

    try:
        return take_again(captured, engine, run)
    finally:
        engine.close()


def take_again(captured: Captured, engine: Precision, run: Callable[[Any], object]) -> Replayed:
    """Restore a capture into a model under :class:`Precision`, and take its step.

    Args:
        captured: The capture.
        engine: A new Precision, which stops at what it finds.
        run: Runs forward and backward of a micro-batch.
    """
    judged: list[Judged] = []
    restore_(captured, engine)
    before = {name: value.clone() for name, value in engine.masters.items()}
    with repeating(captured, engine.model) as batches:
        for batch in batches:
            run(batch)
        engine.on_incurable = judged.append
        try:
            result = engine.step()
            reason = result.reason or "applied"
            found = Finding(reason, result.loss, result.grad_norm, torch.get_num_threads())
        except (NonFiniteError, SpikeError):
            found = finding(judged[-1])
    after = dict(engine.masters.items())
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return compared(captured, str(engine.policy), found, unchanged=unchanged)


def compared(captured: Captured, policy: str, found: Finding, *, unchanged: bool) -> Replayed:
    """What the replay of a capture has found, beside what the capture says."""
    here = environment(torch.device("cpu"))
    then = captured.values["environment"]
    differs = [f"torch {then['torch']!s:.40}"] if then.get("torch") != here["torch"] else []
    return Replayed(
        step=captured.values["step"],
        precision=policy,
        captured_precision=captured.policy,
        captured=captured.found,
        found=found,
        unchanged=unchanged,
        differs=", ".join(differs),
    )


def restore_(captured: Captured, engine: Precision) -> None:
    """Put a captured state into a model under Precision; its moments only in the same policy."""
    values = captured.values
    with restoring(captured):
        load_model_(captured, engine.model)
        engine.take_weights_()
        same = captured.policy == str(engine.policy)
        if same:
            for optimizer, state in zip(engine.optimizers, values["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        weights = None if same else values["weights"]
        engine.load_state_dict(values["state"], weights=weights)


@torch.no_grad()
def load_model_(captured: Captured, model: nn.Module) -> None:
    """Write the captured weights and buffers into a model, and which of its parts evaluate."""
    saved = captured.values
    for kind, tensors in (
        ("weights", dict(model.named_parameters())),
        ("buffers", dict(model.named_buffers())),
    ):
        shapes = {name: tuple(t.shape) for name, t in saved[kind].items()}
        tensors = {plain_name(name): tensor for name, tensor in tensors.items()}
        mine = {name: tuple(t.shape) for name, t in tensors.items()}
        if shapes != mine:
            odd = sorted(set(shapes) ^ set(mine)) or [n for n in mine if mine[n] != shapes[n]]
            raise CheckpointError(
                f"{captured.path}: of another model: {kind} {', '.join(map(str, odd[:5]))} differ"
            )
        for name, tensor in tensors.items():
            tensor.copy_(saved[kind][name])
    evaluating = set(saved["evaluating"])
    for name, part in model.named_modules():
        part.training = plain_name(name) not in evaluating


@contextmanager
def repeating(captured: Captured, model: nn.Module) -> Iterator[Iterator[Any]]:
    """The micro-batches on the model's device, each under its threads and random state."""
    threads, device = torch.get_num_threads(), device_of(model)

    def each() -> Iterator[Any]:
        for batch, states in zip(captured.batches, captured.values["random"], strict=True):
            with restoring(captured):
                set_random_state_(states, device)
            yield on_device(batch, device)

    torch.set_num_threads(captured.found.threads)
    try:
        yield each()
    finally:
        torch.set_num_threads(threads)


def on_device(batch: Any, device: torch.device) -> Any:
    """A nested batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: on_device(part, device) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(part, device) for part in batch)
    return batch


@contextmanager
def restoring(captured: Captured) -> Iterator[None]:
    """Say which capture it is where its state does not fit."""
    try:
        yield
    except CheckpointError:
        raise
    except (HalfstepError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as e:
        raise CheckpointError(
            f"{captured.path}: its state does not fit this model and optimizer: {e!s:.300}"
        ) from e
