"""Captures: a step that went wrong, kept whole so that it can be taken again.

A capture holds what the step began with and what it found::

    before    weights and buffers, the optimizers' and Precision's (or a scaler's) state
    batches   each micro-batch, with the state of torch's random generators at its forward
    found     reason, loss, gradient norm; the number of threads that computed them
    made by   policy, rank, and the versions and device that it ran with

Weights and optimizer state are read when the step has failed, as nothing has changed them by then.
Buffers, such as running means, are copied before each step, since its forward changes them.
"""

from __future__ import annotations

import dataclasses
import platform
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.diagnostics.capture.sealed import write_sealed
from halfstep.errors import CheckpointError, HalfstepError
from halfstep.precision.policy.policy import PrecisionPolicy
from halfstep.precision.policy.rules import plain_name
from halfstep.precision.scaling.gradients import Judged

CAPTURES = "captures"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a step found, and the number of threads that it was computed with."""

    reason: str
    loss: float
    grad_norm: float
    threads: int

    def same_bits(self, other: Finding) -> bool:
        """Whether loss, norm and reason are equal in every bit; a NaN equals a NaN."""
        mine, theirs = ((f.reason, f.loss.hex(), f.grad_norm.hex()) for f in (self, other))
        return mine == theirs

    def to_json(self) -> dict[str, Any]:
        """All fields, with the bits of loss and norm as text."""
        found = dataclasses.asdict(self)
        return found | {key: found[key].hex() for key in ("loss", "grad_norm")}


def finding(judged: Judged) -> Finding:
    """What was found about a step that must not be applied."""
    return Finding(str(judged.reason), judged.loss, judged.norm, torch.get_num_threads())


def read_finding(found: object) -> Finding | None:
    """Read :meth:`Finding.to_json` of a file that may come from anywhere; None if it is none."""
    fields = {"reason": str, "loss": str, "grad_norm": str, "threads": int}
    if isinstance(found, dict) and set(found) == set(fields):
        plain = all(type(found[key]) is kind for key, kind in fields.items())
        if plain and 1 <= found["threads"] <= 4096:
            try:
                loss, norm = (float.fromhex(found[key]) for key in ("loss", "grad_norm"))
                return Finding(found["reason"][:40], loss, norm, found["threads"])
            except (ValueError, OverflowError):
                pass
    return None


class Steps(Protocol):
    """Something that takes a model's steps: a :class:`halfstep.Precision`, or a scaler's loop."""

    @property
    def model(self) -> nn.Module:
        """The model whose steps are captured."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Its optimizers."""

    @property
    def policy(self) -> PrecisionPolicy | str:
        """The precision, as the capture names it."""

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, besides model and optimizers."""


def random_state(device: torch.device) -> list[Tensor]:
    """The state of torch's generators: the CPU's, and the device's."""
    found = [torch.get_rng_state()]
    if device.type != "cpu":
        found.append(getattr(torch, device.type).get_rng_state())
    return found


def set_random_state_(states: Sequence[Tensor], device: torch.device) -> None:
    """Put back what :func:`random_state` gave; a state of another kind of device stays away."""
    torch.set_rng_state(states[0])
    if device.type != "cpu" and len(states) > 1:
        getattr(torch, device.type).set_rng_state(states[1])


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class Captures:
    """Keeps what the present step begins with, and writes it where the step goes wrong."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Write into ``folder/captures``, and keep the newest ``keep`` there."""
        self._folder, self._keep = folder / CAPTURES, keep
        self._batches: list[Any] = []
        self._random: list[list[Tensor]] = []
        self._buffers: dict[str, Tensor] = {}
        self._failed = False

    def begin(self, model: nn.Module, batch: Any, *, first: bool) -> None:
        """Remember a micro-batch before its forward; the first one begins a step."""
        if first:
            self._batches, self._random = [], []
            self._buffers = {
                plain_name(name): buffer.detach().clone() for name, buffer in model.named_buffers()
            }
        self._batches.append(batch)
        self._random.append(random_state(device_of(model)))

    def write(self, steps: Steps, step: int, found: Finding, *, guarded: bool) -> Path | None:
        """Write the step that has just failed; where it cannot be, warn once and return None.

        With several ranks all of them call it, and each writes its own part.

        Args:
            steps: What takes the steps, as before the step.
            step: Its number, from 1.
            found: What it found.
            guarded: Whether spikes are looked for, so that a replay looks for them too.
        """
        rank, size = rank_and_size()
        final = capture_path(self._folder, step)
        part = final if size == 1 else final / f"rank-{rank:05d}"
        error = ""
        try:
            if not self._batches:
                raise CheckpointError("no batch of it is known; call batch(...) before its forward")
            values = self._values(steps, found) | {"step": step, "guarded": guarded}
            write_sealed(part, values | {"rank": rank, "ranks": size})
            if rank == 0:
                self._prune()
        except (HalfstepError, OSError) as failed:
            error = str(failed)
        if error and not self._failed:
            self._failed = True
            warnings.warn(f"no capture of step {step}: {error}; training goes on", stacklevel=2)
        return None if error else part

    def _values(self, steps: Steps, found: Finding) -> dict[str, Any]:
        model = steps.model
        weights = {plain_name(name): value for name, value in model.named_parameters()}
        return {
            "policy": str(steps.policy),
            "found": found.to_json(),
            "environment": environment(device_of(model)),
            "weights": weights,
            "buffers": self._buffers,
            "evaluating": [
                plain_name(name) for name, part in model.named_modules() if not part.training
            ],
            "optimizers": [optimizer.state_dict() for optimizer in steps.optimizers],
            "state": steps.state_dict(),
            "batches": self._batches,
            "random": self._random,
        }

    def _prune(self) -> None:
        # by age, not by name: an earlier run in the same folder may have come further
        found = sorted(self._folder.glob("step-*"), key=lambda path: path.stat().st_mtime_ns)
        for old in found[: -self._keep]:
            shutil.rmtree(old)


def capture_path(folder: Path, step: int) -> Path:
    """Where the capture of a step is, in a folder of captures; named by the steps before it."""
    return folder / f"step-{step - 1:08d}"


def environment(device: torch.device) -> dict[str, str]:
    """What a capture was made with, so that a replay that differs can be explained."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": f"{device.type} {name}".strip(),
    }


def rank_and_size() -> tuple[int, int]:
    """This process's rank in the default group, and the number of its ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
