"""Captures: a step that went wrong, kept whole so that it can be replayed bit for bit.

A capture holds what the step began with and what it found::

    tensors.safetensors   every tensor, by number
    values.json           everything else, with the tensors' numbers where they stand
    manifest.json         the SHA-256 of both

Its values are weights and buffers, the optimizers' and Precision's state; each micro-batch with the
state of torch's random generators at its forward; reason, loss, gradient norm and the number of
threads that computed them; the policy and the version of torch.

Weights and optimizer state are read when the step has failed, as nothing has changed them by then.
Buffers, such as running means, are copied before each step, since its forward changes them. A
capture may come from a stranger: reading one unpickles, evaluates and fetches nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import CheckpointError, HalfstepError, NonFiniteError, SpikeError
from halfstep.files import read_json, require_plain, require_sha256, sha256, sync_folder
from halfstep.precision.masters.local_part import is_sharded
from halfstep.precision.policy.rules import plain_name
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.recovery import OnSpike
from halfstep.precision.scaling.gradients import Judged
from halfstep.precision.step import Precision

CAPTURES = "captures"
TENSORS, VALUES, MANIFEST = "tensors.safetensors", "values.json", "manifest.json"
_FORMAT = "halfstep-capture-1"
_DEEPEST = 60
"""Levels of nesting that are read; a stranger's file may hold more than Python's stack."""
_PLAIN = (str, int, bool, type(None))
_KEYS = {
    "policy": str,
    "found": dict,
    "torch": str,
    "weights": dict,
    "buffers": dict,
    "evaluating": list,
    "optimizers": list,
    "state": dict,
    "batches": list,
    "random": list,
    "step": int,
    "guarded": bool,
}


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


def _random_state(device: torch.device) -> list[Tensor]:
    """The state of torch's generators: the CPU's, and the device's."""
    found = [torch.get_rng_state()]
    if device.type != "cpu":
        found.append(getattr(torch, device.type).get_rng_state())
    return found


def _set_random_state_(states: Sequence[Tensor], device: torch.device) -> None:
    """Put back what :func:`random_state` gave; a state of another kind of device stays away."""
    torch.set_rng_state(states[0])
    if device.type != "cpu" and len(states) > 1:
        getattr(torch, device.type).set_rng_state(states[1])


def _device_of(model: nn.Module) -> torch.device:
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
        self._random.append(_random_state(_device_of(model)))

    def write(self, precision: Precision, step: int, found: Finding, *, guarded: bool) -> None:
        """Write the step that has just failed; where it cannot be, warn once.

        Args:
            precision: What takes the steps, as before the step.
            step: Its number, from 1.
            found: What it found.
            guarded: Whether spikes are looked for, so that a replay looks for them too.
        """
        try:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise CheckpointError("a step of several ranks, of which none is captured")
            if not self._batches:
                raise CheckpointError("no batch of it is known; call batch(...) before its forward")
            values = self._values(precision, found) | {"step": step, "guarded": guarded}
            write_sealed(self._folder / f"step-{step - 1:08d}", values)  # by the steps before it
            self._prune()
        except (HalfstepError, OSError) as failed:
            if not self._failed:
                self._failed = True
                text = f"no capture of step {step}: {failed}; training goes on"
                warnings.warn(text, stacklevel=2)

    def _values(self, precision: Precision, found: Finding) -> dict[str, Any]:
        model = precision.model
        return {
            "policy": str(precision.policy),
            "found": found.to_json(),
            "torch": torch.__version__,
            "weights": {plain_name(name): value for name, value in model.named_parameters()},
            "buffers": self._buffers,
            "evaluating": [
                plain_name(name) for name, part in model.named_modules() if not part.training
            ],
            "optimizers": [optimizer.state_dict() for optimizer in precision.optimizers],
            "state": precision.state_dict(),
            "batches": self._batches,
            "random": self._random,
        }

    def _prune(self) -> None:
        # by age, not by name: an earlier run in the same folder may have come further
        found = sorted(self._folder.glob("step-*"), key=lambda path: path.stat().st_mtime_ns)
        for old in found[: -self._keep]:
            shutil.rmtree(old)


# A folder of nested values, complete under its name or not there at all.


def write_sealed(folder: Path, values: Mapping[str, Any]) -> None:
    """Write values into a new folder; a folder of that name is replaced.

    Raises:
        CheckpointError: If it cannot be written, or holds something that is no tensor, number,
            text, list, tuple or dict of these.
    """
    temporary = folder.parent / f".unfinished-{folder.name}"
    tensors: dict[str, Tensor] = {}
    packed = _pack(values, tensors, "")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        safetensors.torch.save_file(tensors, temporary / TENSORS)
        (temporary / VALUES).write_text(json.dumps(packed), encoding="utf-8")
        files = {name: sha256(temporary / name) for name in (TENSORS, VALUES)}
        manifest = {"format": _FORMAT, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        sync_folder(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error


def is_sealed(folder: Path) -> bool:
    """Whether a folder looks like one that :func:`write_sealed` wrote."""
    return (folder / VALUES).is_file()


def read_sealed(folder: Path) -> dict[str, Any]:
    """Read a folder's values, with tensors in new memory on the CPU.

    Raises:
        CheckpointError: If it is missing, damaged or foreign; the message names the file.
    """
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: a link, not a capture; give the folder that it leads to")
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files")
    named = isinstance(files, dict) and set(files) == {TENSORS, VALUES}
    if manifest.get("format") != _FORMAT or not named:
        raise CheckpointError(
            f"{folder / MANIFEST}: no manifest of a capture; allowed: what halfstep.Recorder wrote"
        )
    for name, expected in manifest["files"].items():
        require_sha256(folder / name, str(expected))
    require_plain(folder / TENSORS)
    try:
        tensors = safetensors.torch.load_file(folder / TENSORS)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / TENSORS}: cannot be read: {error!s:.200}") from error
    try:
        found = _unpack(read_json(folder / VALUES), tensors, 0)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{folder / VALUES}: damaged: {error!r:.200}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder / VALUES}: damaged: no table of values")
    return found


def _pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """The JSON for a value, whose tensors go into ``tensors``; ``where`` is for the error."""
    if isinstance(value, Tensor):
        return _pack_tensor(value, tensors, where)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(float(value))}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str | int):  # a class of its own, such as a version or an enum
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, Mapping):
        pairs = [[k, _pack(v, tensors, f"{where}[{k!r:.40}]")] for k, v in value.items()]
        if all(type(key) in (str, int) for key, _ in pairs):
            return {"dict": pairs}
    elif isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_pack(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]}
    raise CheckpointError(
        f"{where or 'the value'} is a {type(value).__name__}, which no capture holds; allowed: "
        "tensors, numbers, text, None, and lists, tuples and dicts of them"
    )


def _pack_tensor(tensor: Tensor, tensors: dict[str, Tensor], where: str) -> dict[str, Any]:
    """A tensor's number, and its dims in memory order, slowest first, as 8-bit codes need them."""
    if is_sharded(tensor) or tensor.is_sparse or tensor.is_complex():
        raise CheckpointError(
            f"{where} is a sharded, sparse or complex tensor, which no capture holds; allowed: "
            "dense real tensors that this process holds whole"
        )
    strides = tensor.stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    number = str(len(tensors))
    tensors[number] = tensor.detach().cpu().permute(order).contiguous().clone()
    return {"tensor": number, "order": order}


def _unpack(packed: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    """The value of its JSON; each kind is checked, as the file may come from anywhere."""
    if depth > _DEEPEST:
        raise ValueError("nested too deep")
    if type(packed) in (*_PLAIN, float):
        return packed
    kind = next(iter(packed), "")
    content = packed[kind]
    if kind == "tensor":
        order = packed["order"]
        return tensors[content].permute([order.index(dim) for dim in range(len(order))])
    if len(packed) != 1:
        raise ValueError(f"{sorted(packed)[:5]} is no value")
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
    if kind == "dict":
        return {_key(key): _unpack(value, tensors, depth + 1) for key, value in content}
    made: Any = {"list": list, "tuple": tuple}[kind]
    return made(_unpack(value, tensors, depth + 1) for value in content)


def _key(key: Any) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"{key!r:.40} is no key")
    found: str | int = key
    return found


# Replays.


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
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.precision != self.captured_precision:
            if self.survives:
                return f"{self.precision} would have survived"
            return f"{self.precision} would not have survived"
        if self.repeated:
            return "the step repeats bit for bit: the batch, the weights or the model make it"
        if self.differs:
            return (
                f"the step does not repeat: another machine, another torch ({self.differs}), or a "
                "fault that is gone"
            )
        return "the step does not repeat: another machine, another torch, or a fault that is gone"


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
    """Read a capture.

    Raises:
        CheckpointError: If it is none, or is damaged.
    """
    path = Path(path)
    values = read_sealed(path)
    wrong = [k for k, kind in _KEYS.items() if not isinstance(values.get(k), kind)]
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
    _restore_(captured, engine)
    before = {name: value.clone() for name, value in engine.masters.items()}
    with _repeating(captured, engine.model) as batches:
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
    then = captured.values["torch"]
    return Replayed(
        step=captured.values["step"],
        precision=str(engine.policy),
        captured_precision=captured.policy,
        captured=captured.found,
        found=found,
        unchanged=all(torch.equal(before[name], after[name]) for name in before),
        differs="" if then == torch.__version__ else f"torch {then:.40}",
    )


def _restore_(captured: Captured, engine: Precision) -> None:
    """Put a captured state into a model under Precision; its moments only in the same policy."""
    values = captured.values
    with _restoring(captured):
        _load_model_(captured, engine.model)
        engine.take_weights_()
        same = captured.policy == str(engine.policy)
        if same:
            for optimizer, state in zip(engine.optimizers, values["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        weights = None if same else values["weights"]
        engine.load_state_dict(values["state"], weights=weights)


@torch.no_grad()
def _load_model_(captured: Captured, model: nn.Module) -> None:
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
def _repeating(captured: Captured, model: nn.Module) -> Iterator[Iterator[Any]]:
    """The micro-batches on the model's device, each under its threads and random state."""
    threads, device = torch.get_num_threads(), _device_of(model)

    def each() -> Iterator[Any]:
        for batch, states in zip(captured.batches, captured.values["random"], strict=True):
            with _restoring(captured):
                _set_random_state_(states, device)
            yield _on_device(batch, device)

    torch.set_num_threads(captured.found.threads)
    try:
        yield each()
    finally:
        torch.set_num_threads(threads)


def _on_device(batch: Any, device: torch.device) -> Any:
    """A nested batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _on_device(part, device) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_on_device(part, device) for part in batch)
    return batch


@contextmanager
def _restoring(captured: Captured) -> Iterator[None]:
    """Say which capture it is where its state does not fit."""
    try:
        yield
    except CheckpointError:
        raise
    except (HalfstepError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as e:
        raise CheckpointError(
            f"{captured.path}: its state does not fit this model and optimizer: {e!s:.300}"
        ) from e
