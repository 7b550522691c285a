"""Records what the steps of anybody's loop computed, small enough to keep: ``halfstep.record``."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import save
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from halfstep.diagnostics.module_calls import Location, ModuleCalls
from halfstep.diagnostics.nonfinite.operations import floating, stored
from halfstep.diagnostics.records.sketch import (
    K,
    bit_sum,
    block_sums,
    fold,
    sample_hashes,
    sketch_of,
)
from halfstep.diagnostics.statistics.steps import OptimizerSteps, StepListener
from halfstep.diagnostics.trace import Ran, Tracker
from halfstep.errors import PrecisionError, StorageError
from halfstep.files import write_whole
from halfstep.precision.masters.portable import Hook
from halfstep.precision.policy.policy import dtype_name
from halfstep.precision.step import Precision

FORMAT = 1
MOST_BYTES = 1_000_000  # of a step and rank
_LONGEST = 80  # characters of an option that is kept


def step_file(step: int, rank: int) -> str:
    """The name of the file of a step, as one rank saw it."""
    return f"step-{step:08d}.r{rank}.safetensors"


class record(StepListener):
    """Records the steps of a loop, for :func:`halfstep.compare` with those of another run.

    Kept are a sketch and a sum of the bits of every operation's result, forward and backward, and
    of every weight and gradient; the operations' options; and hashes of samples, masks and labels.
    It changes no bit of the training. Modules that ``torch.compile`` compiles run uncompiled inside
    of a recorded step; each rank writes its own files. The metrics of a run are written by
    :class:`halfstep.Recorder`.

    Args:
        model: The model that is trained.
        to: A folder for the record; what an older record of it holds after ``start`` is removed.
        source: The loop's :class:`halfstep.Precision`, its optimizer, or all of several that step
            in turn. None: any optimizer that holds one of the model's parameters.
        scaler: The loop's gradient scaler (torch's or halfstep's), where it has one.
        every: Record the first step and every ``every``-th.
        steps: How many steps to record at most; None: all of these.
        start: Steps before this context's first, in a resumed run.

    Raises:
        PrecisionError: If an argument is not one of these.
        StorageError: If the folder cannot be written.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> folder = tempfile.mkdtemp()
        >>> with record(model, folder, optimizer):
        ...     model(torch.ones(8, 4)).sum().backward()
        ...     optimizer.step()
        >>> sorted(path.name for path in Path(folder).iterdir())
        ['record.json', 'step-00000001.r0.safetensors']
    """

    def __init__(
        self,
        model: nn.Module,
        to: str | Path,
        source: Precision | Optimizer | Sequence[Optimizer] | None = None,
        *,
        scaler: Any = None,
        every: int = 1,
        steps: int | None = None,
        start: int = 0,
    ) -> None:
        super().__init__("record", model, source, scaler, every, None, start)
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise PrecisionError(f"record(steps={steps!r:.80}); allowed: an integer >= 1, or None")
        self._folder, self._left = Path(to), math.inf if steps is None else steps
        self._last: _Step | None = None
        self._rank, self._world = 0, 1

    def __enter__(self) -> Self:
        """Record the loop's steps from now on."""
        if dist.is_available() and dist.is_initialized():
            self._rank, self._world = dist.get_rank(), dist.get_world_size()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.glob(f"step-*.r{self._rank}.safetensors"):
                if not self._start or path.name > step_file(self._start, self._rank):
                    path.unlink()
            if not self._rank:
                head = {
                    "format": FORMAT,
                    "torch": torch.__version__,
                    "model": type(self._model).__name__,
                    "policy": "" if self._precision is None else str(self._precision.policy),
                    "world": self._world,
                }
                write_whole(self._folder / "record.json", json.dumps(head, indent=1))
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot be written: {error}") from error
        self._depth = _len_torch_dispatch_stack()
        self._begin()
        return self

    def close(self) -> None:
        """Leave the loop alone again; the record can be read."""
        super().close()
        if self._last is not None:
            self._last.close()
        self._last = None

    def _collect(self, step: int) -> _Step | None:
        if self._last is not None:
            self._last.close()  # above which somebody else's mode may have been
        due = self._left and (step == 1 or step % self._every == 0)
        if not due or self._steps is None or _len_torch_dispatch_stack() != self._depth:
            return None
        self._last = _Step(self._model, self._steps.scale)
        return self._last

    def _measured(self, applied: bool) -> None:
        found: _Step = self.collector
        self._left -= 1
        optimizers = self._steps.ended if isinstance(self._steps, OptimizerSteps) else []
        if self._precision is not None:
            optimizers = [*self._precision.optimizers]
        content = found.content(optimizers, {"step": self._step, "applied": applied})
        path = self._folder / step_file(self._step, self._rank)
        try:
            write_whole(path, content)
        except OSError as error:
            warnings.warn(f"{path}: {error}; this step is not recorded", stacklevel=2)


def _reference(tensor: Tensor) -> StorageWeakRef:
    """A weak reference to a storage, which keeps its key from being used again."""
    return StorageWeakRef(stored(tensor).untyped_storage())  # type: ignore[no-untyped-call]


class _Step(Tracker):  # type: ignore[no-untyped-call]
    """What one step computed, as rows that name the rows that they read; it ends at the update."""

    def __init__(self, model: nn.Module, scale: Callable[[], float]) -> None:
        super().__init__(model, ModuleCalls(model, lambda *_: None))
        self._ask, self._scale = scale, 0.0
        self._parameters = dict(model.named_parameters())
        self._rows: list[dict[str, Any]] = []
        self._sums: list[Tensor] = []
        self._bits: list[Tensor] = []
        self._hashes: list[Tensor] = []
        self._writers: dict[int, tuple[StorageWeakRef, tuple[int, ...]]] = {}
        self._stored = {
            k: v for n, m in reversed([*model.named_modules()]) for k, v in _stored_in(m, n).items()
        }
        self._derived: dict[int, StorageWeakRef] = {}  # storages of integers that may differ
        self._known: dict[Any, tuple[Tensor, int]] = {}
        self._passes: list[dict[str, Any]] = []
        self._samples = 1
        self._facts = [*self._described()]
        self._sealed, self._on = False, True
        hook = Hook(self._begin)
        self._handle = model.register_forward_pre_hook(hook, with_kwargs=True)
        self._depth = _len_torch_dispatch_stack()
        self.__enter__()

    @property
    def empty(self) -> bool:
        """Whether nothing has run yet."""
        return not self._rows

    def close(self) -> None:
        """Record no more operations, and let go of every tensor that was looked at."""
        self._seal()
        self._writers, self._known = {}, {}

    def _seal(self) -> None:
        """Record no more operations; leave the stack of modes, unless another is on top of it."""
        self._sealed = True
        if self._on and _len_torch_dispatch_stack() == self._depth + 1:
            self._handle.remove()
            self.__exit__(None, None, None)
            self._on = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._sealed:
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        several = result if isinstance(result, tuple) else (result,)
        if len(several) > 1 or _is_whole(result):
            self._derive(several, [*args, *(kwargs or {}).values()])
        return result

    def _described(self) -> Iterator[list[Any]]:
        for name, module in self._model.named_modules():
            plain = {
                k: v
                for k, v in vars(module).items()
                if isinstance(v, bool | int | float | str) and k != "training" and k[:1] != "_"
            }
            plain = {k: v for k, v in plain.items() if len(str(v)) < _LONGEST}
            yield [name, type(module).__name__, module.extra_repr()[:200], module.training, plain]

    # --- batches ---------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Begin a forward of the model with a batch, or go on with what the step computed."""
        again = torch._C._current_graph_task_id() != -1  # by a checkpoint
        named = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        computed = self._passes and any(map(self._computed, named.values()))
        if not (self._sealed or again or computed) and torch.is_grad_enabled():
            self._sealed = True  # its own operations are none of the model's
            with torch.no_grad():
                self._batch(named)
            self._sealed = False

    def _batch(self, named: Mapping[str, Any]) -> None:
        states = [torch.get_rng_state()]
        if torch.cuda.is_available():
            states.append(torch.cuda.get_rng_state())
        random = zlib.crc32(b"".join(state.numpy().tobytes() for state in states))
        batch: dict[str, Any] = {"random": random, "batch": {}, "samples": 0}
        self._passes.append(batch)
        for name, value in named.items():
            if isinstance(value, Tensor) and value.dim() and value.numel():
                size = batch["samples"] = batch["samples"] or len(value)
                made = self._computed(value)
                if len(value) == size and not isinstance(value, DTensor) and not made:
                    hashes = sample_hashes(value.detach(), size)
                    kind = dtype_name(value.dtype) if value.is_floating_point() else "int"
                    batch["batch"][name] = [kind, hashes]
                for tensor in floating(value) if not made else ():
                    self._source(tensor, Location(), f"input {name}")
        groups = batch["samples"] or 1
        while groups > K and not groups % 2:
            groups //= 2
        self._samples = groups if groups <= K else 1

    def _computed(self, value: Any) -> bool:
        rows = self._rows_of(*floating(value))
        return any(self._rows[row]["direction"] != "source" for row in rows)

    # --- operations ------------------------------------------------------------------------------

    def _put(self, value: Tensor, groups: int, blocks: int = 32, **row: Any) -> int:
        self._sums.append(block_sums(value, groups, blocks))
        self._bits.append(bit_sum(value))
        forms = [dtype_name(value.dtype)]
        plain = {"inputs": forms, "outputs": forms, "args": {}, "reads": [], "ints": {}}
        number = max(len(self._passes) - 1, 0)
        where = {"number": number, "shape": [*value.shape], "groups": groups}
        self._rows.append({**plain, **row, **where})
        return len(self._rows) - 1

    def ran(self, one: Ran) -> None:
        """Keep the sketch of an operation's result; of an update, weights are kept instead."""
        if one.direction != "update":
            with torch.autocast(one.made[0].device.type, enabled=False):  # or sketches have 16 bits
                self._add(one)

    def _add(self, one: Ran) -> None:
        """Add one operation's row, and that of what it reads and nothing seen has made."""
        made, names = one.made[0], one.known.names
        pairs = [*zip(names, one.args, strict=False), *one.kwargs.items()]
        reads: dict[int, None] = {}
        averaged = any(n in ("training", "train") and v is True for n, v in pairs)
        for name, value in pairs:
            if name in one.known.writes or (averaged and name.startswith("running_")):
                values = [t for t in floating(value) if _key(t) in self._writers]
                values = [] if averaged or one.op in ("cast", "copy") else values
            else:
                values = [*floating(value)]
            for tensor in values:
                known = self._rows_of(tensor) or (
                    self._source(tensor, one.place, f"constant {name}"),
                )
                reads |= dict.fromkeys(known)
        shared = _key(made) in {_key(t) for t in one.given} and not one.known.writes
        if (one.op == "cast" and reads) or one.known.collective or shared:
            if not shared:
                self._write(made, tuple(reads))
            return
        again = one.direction == "forward" and torch._C._current_graph_task_id() != -1
        direction = "recomputed" if again else one.direction
        value = stored(made.detach())
        if direction == "backward" and not self._scale:
            self._scale = self._ask()
        size = len(value) if value.dim() else 1
        groups = self._samples if size % self._samples == 0 else 1
        row = self._put(
            value, groups, direction=direction, module=one.place.module, op=one.op,
            inputs=one.inputs, outputs=one.outputs, reads=[*reads][:16],
            args={k: v for k, v in pairs if _is_option(v)},
            ints={k: self._hash(v) for k, v in pairs if self._is_data(v)},
        )  # fmt: skip
        for tensor in one.made:
            self._write(tensor, (row,))

    def passed(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Let what only converts be what it converts."""
        for tensor in made:
            self._write(tensor, self._rows_of(*given))

    def _write(self, tensor: Tensor, rows: tuple[int, ...]) -> None:
        ref = _reference(tensor)
        if rows:
            self._writers[ref.cdata] = ref, rows

    def _rows_of(self, *tensors: Tensor) -> tuple[int, ...]:
        """The rows that have made tensors, as far as that was seen."""
        known = [self._writers[_key(t)][1] for t in tensors if _key(t) in self._writers]
        return tuple(dict.fromkeys(row for rows in known for row in rows))

    def _source(self, tensor: Tensor, place: Location, name: str) -> int:
        """Add a row for a weight, buffer, input or constant that is read for the first time."""
        key = _key(tensor)
        if key not in self._stored and place.class_name:  # FSDP gathers weights for each forward
            self._stored |= _stored_in(self._model.get_submodule(place.module), place.module)
        if key in self._stored:
            name, tensor = self._stored[key]  # which may be read as a view
        value = stored(tensor.detach())
        samples = self._samples if value.dim() and len(value) % self._samples == 0 else 1
        weight = name.startswith(("parameter", "buffer"))
        groups, blocks = (1, K) if weight else (samples, 32)
        row = self._put(value, groups, blocks, direction="source", module=place.module, op=name)
        self._write(tensor, (row,))
        return row

    def _is_data(self, value: Any) -> bool:
        return _is_whole(value) and _key(value) not in self._derived

    def _derive(self, made: Sequence[Any], given: Sequence[Any]) -> None:
        """Remember what has no row: further results, and integers that may differ by rounding."""
        tensors = [*floating(made)]
        for tensor in tensors[1:]:
            if not self._rows_of(tensor):
                self._write(tensor, self._rows_of(tensors[0]))
        whole = [value for value in made if _is_whole(value)]
        if whole and (
            [*floating(given)] or any(_is_whole(v) and not self._is_data(v) for v in given)
        ):
            self._derived |= {_key(value): _reference(value) for value in whole}

    def _hash(self, value: Tensor) -> int:
        """Hash integers or truth values as a whole, and sample by sample in any order."""
        local = stored(value)
        key = (local.data_ptr(), local._version, local.shape, local.stride(), local.dtype)
        if key not in self._known:
            size = len(local) if local.dim() else 1
            groups = self._samples if size % self._samples == 0 else 1
            both = [sample_hashes(local, 1).sum(), sample_hashes(local, groups).sum()]
            self._hashes.append(torch.stack(both))
            self._known[key] = local, len(self._hashes) - 1
        return self._known[key][1]

    # --- weights ---------------------------------------------------------------------------------

    def before(self, name: str, weight: Tensor) -> None:
        """Take a weight before the update, after which nothing more is recorded."""
        self._seal()
        read = self._rows_of(weight)
        if not read or self._rows[read[0]]["op"] != f"parameter {name}":
            self._weight("before", name, weight)  # the forward has read another: a master

    def after(self, name: str, weight: Tensor) -> None:
        """Take a weight after the update."""
        self._weight("after", name, weight)

    def gradient(self, name: str, gradient: Tensor, scale: float) -> None:
        """Keep the sketch of a finished gradient, as it is without the loss scale."""
        self._weight("gradient", name, gradient if scale == 1 else gradient / scale)

    def _weight(self, direction: str, name: str, value: Tensor) -> None:
        parameter, local = self._parameters.get(name), stored(value.detach())
        reads = () if direction == "after" else self._rows_of(value)
        if isinstance(parameter, DTensor) and parameter.shape != local.shape:
            box = parameter.__create_chunk_list__()[0]
            whole = local.new_zeros(parameter.shape)
            part = (slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            whole[tuple(part)] = local
            replicas = [
                c for c, p in zip(parameter.device_mesh.get_coordinate() or (),
                                  parameter.placements, strict=False) if p.is_replicate()
            ]  # fmt: skip
            local, direction = whole, f"{direction} part" if not any(replicas) else "copy"
        if local.numel() and direction != "copy":
            with torch.no_grad(), torch.autocast(local.device.type, enabled=False):
                self._put(local, 1, K, direction=direction, module="", op=name, reads=[*reads])

    def _tied(self) -> Iterator[list[str]]:
        names: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return (each for each in names.values() if len(each) > 1)

    # --- file ------------------------------------------------------------------------------------

    def content(self, optimizers: Sequence[Optimizer], head: dict[str, Any]) -> bytes:
        """The step as a safetensors file, of at most ``MOST_BYTES``."""
        for batch in self._passes:
            batch["batch"] = {k: [form, h.tolist()] for k, (form, h) in batch["batch"].items()}
        groups = [
            {k: v for k, v in group.items() if _is_option(v)}
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        states: dict[str, str] = {
            key: dtype_name(value.dtype)
            for optimizer in optimizers
            for state in optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim()
        }
        head |= {"passes": self._passes, "modules": self._facts, "groups": groups}
        names = [[n, [*p.shape]] for n, p in self._parameters.items()]
        head |= {"parameters": names, "tied": [*self._tied()]}
        head |= {"states": states, "scale": self._scale or 1.0}
        flat = torch.cat(self._sums).cpu().numpy()
        cuts = np.cumsum([len(each) for each in self._sums])[:-1]
        groups_of = [row["groups"] for row in self._rows]
        found = [*map(sketch_of, np.split(flat, cuts), groups_of)]
        arrays = {"bits": torch.stack(self._bits).cpu().numpy()}
        arrays["hashes"] = torch.stack(self._hashes or [torch.zeros(2).long()]).cpu().numpy()
        width = K
        while True:
            rows = [{**row, "width": f.shape[1]} for row, f in zip(self._rows, found, strict=True)]
            text = zlib.compress(json.dumps({**head, "rows": rows}).encode(), 1)
            arrays["step"] = np.frombuffer(text, np.uint8)
            arrays["sketches"] = np.concatenate([f.reshape(-1) for f in found])
            if sum(a.nbytes for a in arrays.values()) < MOST_BYTES or width == 1:
                return save(arrays, {"sha256": digest_of(arrays)})
            width //= 2
            found = [fold(f, width) for f in found]


def _stored_in(module: nn.Module, name: str) -> dict[int, tuple[str, Tensor]]:
    """A module's own parameters and buffers by their storage, with their names."""
    found = {}
    for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
        for own, tensor in held.items():
            if tensor is not None and not nn.parameter.is_lazy(tensor) and tensor.numel():
                found[_key(tensor)] = f"{kind} {name}.{own}".replace(" .", " "), tensor
    return found


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """The SHA-256 of arrays, as hex digits."""
    return hashlib.sha256(b"".join(arrays[key].tobytes() for key in sorted(arrays))).hexdigest()


def _key(tensor: Tensor) -> int:
    return int(stored(tensor).untyped_storage()._cdata)


def _is_option(value: Any) -> bool:
    """Whether an argument is a plain value that a comparison can show."""
    if isinstance(value, list | tuple):
        return len(value) <= 8 and all(_is_option(v) for v in value)
    return value is None or (
        isinstance(value, bool | int | float | str) and len(str(value)) < _LONGEST
    )


def _is_whole(value: Any) -> bool:
    """Whether it is a tensor of integers or truth values, with elements."""
    whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return whole and bool(value.numel()) and value.device.type != "meta"
