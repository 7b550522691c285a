"""The dtypes of a training program as rows: recorded, written as a file, and compared with it.

A row says that something is in a dtype: an operation of a module, a collective over an axis of the
mesh, a parameter, its gradient, an optimizer's state, a buffer. Rows are sets without counts and
shapes, and layers of a model share theirs, so that another seed, batch, number of steps, of layers
or of ranks leaves them as they are. What only such a change can bring or take away, as a sum over
a batch of 1, is no difference by itself; the same operation in another dtype always is.
"""

from __future__ import annotations

import gc
import json
import platform
import re
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.diagnostics.module_calls import Location, ModuleCalls
from halfstep.diagnostics.nonfinite.operations import FILLS, floating, operation
from halfstep.diagnostics.trace import Ran, Tracker, is_product
from halfstep.errors import CheckpointError, DataError
from halfstep.files import read_json, write_whole
from halfstep.precision.casting.autocast import SWITCHES, setting_of
from halfstep.precision.casting.op_table import OPS
from halfstep.precision.masters.local_part import storage_key
from halfstep.precision.policy.policy import dtype_name
from halfstep.shown import Finding, role

FORMAT = 1
_OUTSIDE = "-"  # of all modules
_WRAPPERS = re.compile(
    r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)"
    r"(\.|$)"
)
_MOVES = FILLS | {  # values without rounding them; those that compute with them have rows
    *("copy", "clone", "cat", "stack", "index", "index_select", "gather", "index_put", "flip"),
    *("repeat", "pad", "roll", "zero", "zeros", "ones", "eye", "arange", "linspace", "tril"),
    *("triu", "sort", "topk", "max", "min", "amax", "amin", "maximum", "minimum", "sign", "abs"),
    *("neg", "clamp", "clamp_min", "clamp_max", "detach", "alias", "lift_fresh", "contiguous"),
    *("rand", "randn", "normal", "uniform", "bernoulli", "multinomial", "random", "exponential"),
    *("slice_backward", "select_backward", "embedding_dense_backward", "split_with_sizes_copy"),
    *("masked_scatter", "unfold_backward", "slice_scatter", "select_scatter", "unbind_copy"),
}
_DECIDING = {  # operations that a model has or has not, whatever its batch
    *("matmul", "attention", "softmax", "log_softmax", "embedding"),
    *("amp_foreach_non_finite_check_and_unscale",),
    *(name for row in ("norm", "statistics", "loss") for name in OPS[row].names.split()),
}
_MEANS = {"linalg_vector_norm": "norm", "fused_rms_norm": "rms_norm"}
_COLLECTIVES = {  # the beginning of a name without underscores, to what it is
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    **{name: name for name in ("gather", "scatter", "reduce", "send", "recv")},
}
_ENGINES = ("/distributed/fsdp/", "/_composable/", "/nn/parallel/distributed.py", "/comm_hooks/")
_CALL = nn.Module._call_impl.__code__
_SECTIONS = ("switches", "parameters", "buffers", "operations", "gradients", "states", "collectives")
_DIRECTIONS = ("forward", "no_grad", "backward", "update")
_Rows = dict[tuple[str, str, str], set[str]]


class _Calls(ModuleCalls):
    """The forwards of all modules of a program, whoever calls them."""

    def __init__(self) -> None:
        super().__init__(nn.Module(), ended=lambda call, output: None)
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._owners: dict[int, str] = {}  # of parameters
        self.models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()

    def hook(self) -> None:
        """Register hooks on every module."""
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(self.begin),
            register_module_forward_hook(self._end, always_call=True),
        ]

    def begin(self, module: nn.Module, args: Any) -> None:
        """Take the start of a forward; the first outermost one gives the modules their names."""
        if module not in self._names:
            self.models[module] = None
            alone = "" if any(True for _ in module.parameters()) else type(module).__name__
            for name, inner in module.named_modules():
                plain = self._names.setdefault(inner, _plain(name).rstrip(".") or alone)
                for parameter in inner.parameters(recurse=False):
                    self._owners[id(parameter)] = plain
        self._enter(self._names[module], module, args)

    def place(self, names: Mapping[int, tuple[str, bool]]) -> Location:
        """The location of the current operation; that of a gradient's hook is its module."""
        found = super().place(names)
        if not found.module and found.node == "AccumulateGrad":
            leaf = torch._C._current_autograd_node().variable
            return found._replace(module=self._owners.get(id(leaf), ""))
        return found

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave(self._names.get(module, ""), module, args, output)

    def learns(self) -> bool:
        """Whether the running module's forward has a backward, or is one that a backward repeats."""
        return bool(self._running) and (self._running[-1].learns or self._running[-1].task != -1)

    def forget(self) -> None:
        """Forget the forwards that have ended, which no backward needs any more."""
        self._calls.clear()


class contract(Tracker):  # type: ignore[no-untyped-call]
    """Records the dtypes of what a program runs, of its state and of what its ranks exchange.

    Enter it around some training steps of any loop; the steps end with any optimizer's ``step``.
    It changes no bit of them, but what is compiled runs uncompiled.

    Attributes:
        rows: What ran, in which dtype, to the modules or ranks concerned.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with contract() as seen:
        ...     model(torch.ones(3, 4)).mean().backward()
        ...     optimizer.step()
        >>> print(*[row for row in seen.recorded().lines()["operations"] if "matmul" in row])
        backward  .  matmul: fp32 -> fp32 forward  .  matmul: fp32 -> fp32
    """

    def __init__(self) -> None:
        super().__init__(nn.Module(), _Calls())
        self.calls: _Calls = self._modules  # type: ignore[assignment]
        self.rows: _Rows = defaultdict(set)
        self.steps: dict[Optimizer, int] = {}
        self._handles: list[Any] = []
        self._stepping = 0
        self._axes: dict[str, int] = {}
        self._asked: set[str] = set()

    def __enter__(self) -> Self:
        self.listen()
        TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        TorchDispatchMode.__exit__(self, *exception)  # type: ignore[no-untyped-call]
        self.close()

    def listen(self) -> None:
        """Register the hooks on modules and optimizers."""
        self.calls.hook()
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        self.calls.unhook()
        for handle in self._handles:
            handle.remove()

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before a step of an optimizer."""

    def after_step(self) -> None:
        """Called after a step of an optimizer."""

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.before_step(optimizer)
        self._stepping += 1
        self._gradients(optimizer, self._parameters())

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping -= 1
        named = self._parameters()
        self._gradients(optimizer, named)  # those that a closure has made
        for kept in optimizer.state.values():
            for name, value in _tensors(kept):
                self.rows["states", name, _kind(value)].add("")
        self.calls.forget()
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        self.after_step()

    def _parameters(self) -> dict[Tensor, str]:
        named: dict[Tensor, str] = {}
        for model in self.calls.models:
            for name, parameter in model.named_parameters():
                if not nn.parameter.is_lazy(parameter):
                    named.setdefault(parameter, _plain(name))
            for name, value in model.named_buffers():
                if value.is_floating_point():
                    full = _plain(name)
                    self.rows["buffers", role(full), _kind(value)].add(full)
            self._asked |= {dtype_name(asked) for asked in _reductions(model)}
        for parameter, name in named.items():
            self.rows["parameters", role(name), _kind(parameter)].add(name)
        return named

    def _gradients(self, optimizer: Optimizer, named: Mapping[Tensor, str]) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = named.get(parameter, _OUTSIDE)
                if name == _OUTSIDE:  # an engine's masters
                    self.rows["parameters", name, _kind(parameter)].add("")
                if parameter.grad is not None:
                    self.rows["gradients", role(name), _kind(parameter.grad)].add(name)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(kind.__module__.startswith("torch.distributed") for kind in types):
            return NotImplemented  # a DTensor becomes what it runs on this rank
        kwargs = kwargs or {}
        if str(func).startswith(("c10d.", "_c10d_functional.")):
            self.exchanged(func, args, kwargs)
            return func(*args, **kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[arg-type]
        known = operation(func)
        if result is None and known.writes and [*floating(args[:1])]:  # such as _foreach_lerp_
            given, made = [*floating(args)], [*floating(args[:1])]
            direction = "forward" if torch.is_grad_enabled() else "update"
            forms = [tuple(dtype_name(t.dtype) for t in some) for some in (given, made)]
            op = known.base.strip("_")
            if op == "copy" and given[-1].dtype != made[0].dtype:
                op = "cast"
            place = self.calls.place({})
            self.ran(Ran(known, place, direction, op, *forms, given, made, args, kwargs))
        return result

    def ran(self, one: Ran) -> None:
        """Make an operation a row, unless it only moves values or is an engine's own."""
        known, op = one.known, one.op
        if known.collective or op in _MOVES:
            return
        if op != "cast" and one.place.node.startswith("AccumulateGrad"):
            return  # several micro-batches add, and gradients have rows of their own
        if op == "cast" and not _narrows(one.given[-1].dtype, one.made[0].dtype):
            return  # what computes with the wider values has a row
        if any(engine in code for code in _frames_below_a_module() for engine in _ENGINES):
            return
        direction = self._direction(one.place, one.direction)
        inputs = one.inputs[-1:] if op == "cast" else one.inputs
        if is_product(op) and not op.startswith("attention"):
            op, inputs = "matmul", inputs[-2:] if direction == "forward" else inputs
        elif direction == "update" and op != "cast":
            op = "arithmetic"
        op = _MEANS.get(op, op)
        module = one.place.module or ("." if one.place.class_name else _OUTSIDE)
        key = f"{direction}  {role(module)}  {op}"
        form = f"{' '.join(sorted(set(inputs))) or '-'} -> {' '.join(sorted(set(one.outputs)))}"
        self.rows["operations", key, form].add(module)

    def _direction(self, place: Location, seen: str) -> str:
        if place.direction == "backward":
            return "backward"
        if place.class_name:
            return "forward" if self.calls.learns() else "no_grad"
        if seen == "forward":
            return "forward"
        return "update" if self._stepping else "no_grad"

    def exchanged(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make a collective a row, if it carries numbers between ranks."""
        plain = str(func).split(".")[1].replace("_", "")
        kind = next((op for start, op in _COLLECTIVES.items() if plain.startswith(start)), None)
        leaves = tree_leaves((args, dict(kwargs)))
        group = _group_of(leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if kind is None or group is None or group.size() < 2 or not tensors:
            return
        direction, what = self._purpose(kind, tensors)
        axis = _axis(group)
        self._axes[axis] = group.size()
        for tensor in tensors:
            if tensor.is_floating_point() or what in ("gradients", "parameters"):
                key = f"{direction}  {axis}  {kind}  {what}"
                self.rows["collectives", key, dtype_name(tensor.dtype)].add("")

    def _purpose(self, kind: str, tensors: list[Tensor]) -> tuple[str, str]:
        """When a collective runs, and what it carries."""
        place = self.calls.place({})
        node = torch._C._current_autograd_node()
        engine = any(e in code for code in _frames_below_a_module() for e in _ENGINES)
        if engine and kind in ("all_gather", "broadcast"):
            whole = any(t.is_floating_point() for t in tensors) or kind == "all_gather"
            return "any", "parameters" if whole else "counts"
        if engine or (node is not None and "AccumulateGrad" in node.name()):
            return "backward", "gradients"
        if place.direction == "backward" or place.class_name:
            return self._direction(place, "forward"), "activations"
        models = (p for model in self.calls.models for p in model.parameters())
        grads = {storage_key(p.grad) for p in models if p.grad is not None}
        direction = "update" if self._stepping else "outside"
        if any(storage_key(tensor) in grads for tensor in tensors):
            return direction, "gradients"
        return direction, "values"

    def recorded(self) -> Contract:
        """What was recorded so far, in this process."""
        axes = _named_axes(self._axes)
        rows: _Rows = defaultdict(set)
        for (section, key, form), where in self.rows.items():
            words = key.split("  ")
            if section == "collectives":
                words[1] = axes[words[1]]
            rows[section, "  ".join(words), form] |= where
        for switch in (switch for each in SWITCHES.values() for switch in each):
            rows["switches", f"fp32 {switch[1]} of {switch[0]}", setting_of(*switch)] = set()
        ranks = dist.is_available() and dist.is_initialized()
        return Contract(
            rows,
            world=dist.get_world_size() if ranks else 1,
            rank=dist.get_rank() if ranks else 0,
            steps=min(self.steps.values(), default=0),
            axes={axes[name]: size for name, size in self._axes.items()},
            asked=sorted(self._asked),
        )


@dataclass(frozen=True)
class Contract:
    """The dtypes of a program, of one rank or of all.

    Attributes:
        rows: Section, what, and the dtype that it is in; to the modules concerned.
        world: How many ranks there are.
        rank: The rank, where it is of one.
        steps: How many steps of its optimizers were recorded.
        axes: The axes over which the ranks exchanged numbers, to their sizes.
        asked: In which dtypes FSDP is asked to reduce gradients.
        made: What may change rows without a change of the program: torch, and the kind of CPU.
    """

    rows: Mapping[tuple[str, str, str], set[str]]
    world: int = 1
    rank: int = 0
    steps: int = 0
    axes: Mapping[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    made: Mapping[str, str] = field(default_factory=lambda: _here())

    def lines(self) -> dict[str, list[str]]:
        """The rows by section, sorted, as the file holds them."""
        found: dict[str, list[str]] = {}
        for section, key, form in sorted(self.rows):
            found.setdefault(section, []).append(f"{key}: {form}")
        return found

    def write(self, path: str | Path) -> None:
        """Write the file, one row a line, so that its changes read well in git."""
        whole = {"format": FORMAT, "world": self.world, "axes": self.axes, "made": self.made}
        text = json.dumps(whole | {"rows": self.lines()}, indent=1, ensure_ascii=False)
        write_whole(Path(path), f"{text}\n")

    @classmethod
    def read(cls, path: str | Path) -> Contract:
        """Read a file.

        Raises:
            DataError: If there is none, or it is no contract, or of a newer version.
        """
        try:
            found = read_json(str(path))
        except (CheckpointError, OSError) as error:
            text = str(error) if isinstance(error, CheckpointError) else "there is no such file"
            hint = "write it with: halfstep contract record -- COMMAND"
            raise DataError(f"{text if str(path) in text else f'{path}: {text}'}; {hint}") from error
        if isinstance(found.get("format"), int) and found["format"] > FORMAT:
            raise DataError(f"{path}: written by a newer halfstep; this one reads format {FORMAT}")
        try:
            rows: dict[tuple[str, str, str], set[str]] = {}
            for section, lines in found["rows"].items():
                for line in lines:
                    key, form = line.rsplit(": ", 1)
                    rows[section, key, form] = set()
            axes = {str(name): int(size) for name, size in found["axes"].items()}
            made = {str(name): str(value) for name, value in found["made"].items()}
            return cls(rows, world=int(found["world"]), axes=axes, made=made)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: not a contract that halfstep has written") from error

    def findings(self) -> list[Finding]:
        """What is wrong without a file: gradients summed in fewer bits than was asked for."""
        least = min((_bits(name) for name in self.asked), default=0)
        found = []
        for section, key, form in sorted(self.rows):
            if section != "collectives" or not key.endswith("gradients") or _bits(form) >= least:
                continue
            _, axis, op, _ = key.split("  ")
            found.append(Finding(
                level="fault", name="reduced_below_asked",
                what=f"gradients are reduced over {axis} in {form} ({op}), and "
                f"{' and '.join(self.asked)} is what FSDP was asked for",
                do=f"convert them before the sum over {axis}, or give the parameters that are "
                f"whole on every rank of {axis} a module of their own with param_dtype=fp32",
                where=(axis,), values={"axis": axis, "dtype": form, "asked": self.asked},
            ))  # fmt: skip
        return found

    def differences(self, now: Contract) -> list[Finding]:
        """What is in another dtype now, each with the rows that went and came."""
        found = []
        were, are = _by_key(self.rows), _by_key(now.rows)
        judge = _Judge(self, now, were, are)
        for section, key in sorted({*were, *are}, key=_order):
            was, new = were.get((section, key), set()), are.get((section, key), set())
            gone, come = judge.changed(section, key, was, new)
            if not gone and not come:
                continue
            where = {name for form in come for name in now.rows.get((section, key, form), ())}
            found.append(Finding(
                level="fault", name=section,
                what=f"{key} is {_these(new)}, and was {_these(was)}",
                where=tuple(sorted(where - {"", _OUTSIDE, "."})),
                values={"row": key, "gone": sorted(gone), "new": sorted(come)},
            ))  # fmt: skip
        return found


class _Judge(NamedTuple):
    """Which changes of a row are one of the dtypes, and which another batch or step may bring."""

    before: Contract
    now: Contract
    were: Mapping[tuple[str, str], set[str]]
    are: Mapping[tuple[str, str], set[str]]

    def changed(
        self, section: str, key: str, was: set[str], new: set[str]
    ) -> tuple[set[str], set[str]]:
        gone, come = was - new, new - was
        if section == "operations":
            return self._operation(key, gone, come, bool(was), bool(new))
        if section == "collectives":
            axis = key.split("  ")[1]
            both = axis in self.before.axes and axis in self.now.axes
            if not both and self.before.world != self.now.world:
                return set(), set()
            if key.startswith("outside") and not (was and new):
                return set(), come if "gradients" in key else set()
            return gone, come
        if section == "states" or (was and new):
            return gone, come
        forms = {form for (name, _), some in self.were.items() if name == section for form in some}
        return set(), come - forms  # another layer, in no new dtype

    def _operation(
        self, key: str, gone: set[str], come: set[str], known: bool, runs: bool
    ) -> tuple[set[str], set[str]]:
        direction, module, op = key.split("  ")
        place = f"{direction}  {module}  "
        deciding = op.removesuffix("_backward") in _DECIDING and direction != "no_grad"
        if known and runs:
            return gone if deciding else set(), come
        if known:
            stays = any(s == "operations" and k.startswith(place) for s, k in self.are)
            return gone if deciding and stays else set(), set()
        before = {f for (_, k), some in self.were.items() if k.startswith(place) for f in some}
        if not before:  # another module: in dtypes that this operation has elsewhere?
            before = {
                form
                for (_, k), some in self.were.items()
                for form in some
                if k.startswith(direction) and k.endswith(f"  {op}")
            }
            return set(), come - before if before and direction != "no_grad" else set()
        if deciding or (op == "cast" and (direction != "no_grad" or module == _OUTSIDE)):
            return set(), come
        dtypes = {dtype for form in before for dtype in form.split()}
        fresh = {form for form in come if not {*form.split()} <= dtypes}
        return set(), fresh if direction != "no_grad" else set()


def united(parts: Iterable[Contract]) -> Contract:
    """The contract of all ranks; a row that only some have says which."""
    ranks: dict[int, Contract] = {}
    rows: _Rows = defaultdict(set)
    having: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    axes: dict[str, int] = {}
    asked: set[str] = set()
    for part in parts:
        ranks[part.rank] = part
        axes |= part.axes
        asked |= {*part.asked}
        for row, where in part.rows.items():
            rows[row] |= where
            having[row].add(part.rank)
    for row, some in having.items():
        if len(some) < len(ranks):
            rows[row] = {f"rank {rank}" for rank in some} | rows[row]
    world = max(part.world for part in ranks.values())
    steps = min(part.steps for part in ranks.values())
    return Contract(rows, world=world, steps=steps, axes=axes, asked=sorted(asked))


def difference_text(before: Contract, now: Contract, found: list[Finding], names: str) -> str:
    """The differences as a text that reads like one of git: what went, what came, and where."""
    keys = len(_by_key(before.rows))
    lines = [f"{names}: {len(found)} of {keys} rows differ"]
    section = ""
    for one in found:
        if one.name != section:
            section = one.name
            lines.append(f" {section}")
        lines += [f"  - {one.values['row']}: {form}" for form in one.values["gone"]]
        lines += [f"  + {one.values['row']}: {form}" for form in one.values["new"]]
        if one.where:
            more = f", and {len(one.where) - 3} more" if len(one.where) > 3 else ""
            lines.append(f"      in: {', '.join(one.where[:3])}{more}")
    if not {key for _, key in _by_key(now.rows)} & {key for _, key in _by_key(before.rows)}:
        lines.append(" no row is the same: the file may be of another program")
    lines += [f" note: {note}" for note in notes(before, now) if found or "axis" in note]
    return "\n".join(lines)


def notes(before: Contract, now: Contract) -> list[str]:
    """What else differs, and why rows may."""
    found = [
        f"{name} was {before.made.get(name)}, and is {value}; rows may differ for that alone"
        for name, value in now.made.items()
        if before.made.get(name) != value
    ]
    unseen = sorted({*before.axes} - {*now.axes})
    if unseen and before.world != now.world:
        found.append(f"axis {', '.join(unseen)}: not compared, as this has {now.world} of "
                     f"{before.world} ranks")  # fmt: skip
    return found


def _here() -> dict[str, str]:
    low = "native" if torch.cpu.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported() else "simulated"
    return {"torch": torch.__version__.split("+")[0], "machine": platform.machine(), "bf16": low}


def _by_key(rows: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for section, key, form in rows:
        found[section, key].add(form)
    return dict(found)


def _plain(name: str) -> str:
    """A module's or parameter's name without those that wrappers add."""
    return _WRAPPERS.sub("", name)


def _order(row: tuple[str, str]) -> tuple[int, int, str]:
    """Causes before what follows from them: forwards before backwards, parameters before both."""
    section, key = row
    direction = key.split("  ")[0]
    second = _DIRECTIONS.index(direction) if direction in _DIRECTIONS else 0
    return (_SECTIONS.index(section) if section in _SECTIONS else 0), second, key


def _these(forms: Iterable[str]) -> str:
    return " and ".join(sorted(forms)) or "not there"


def _bits(name: str) -> int:
    found = re.search(r"\d+", name)
    return int(found[0]) if found else 0


def _narrows(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether a conversion loses bits, be it of range or of precision."""
    return old.is_floating_point and (old.itemsize > new.itemsize or (
        old.itemsize == new.itemsize and old != new))  # fmt: skip


def _kind(tensor: Tensor) -> str:
    """The dtype, and the class of a tensor that stores its numbers otherwise than it says."""
    name, cls = dtype_name(tensor.dtype), type(tensor)
    own = hasattr(cls, "__tensor_flatten__") and not cls.__module__.startswith("torch.")
    return f"{name} ({cls.__name__})" if own else name


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an optimizer's state for one parameter, with their keys."""
    if isinstance(value, Tensor):
        yield role(name), value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, f"{name}.{key}" if name else str(key))


def _frames_below_a_module() -> Iterator[str]:
    """The files of the code that runs an operation, up to the forward of the nearest module."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _CALL:
        yield frame.f_code.co_filename
        frame = frame.f_back  # type: ignore[assignment]


def _group_of(leaves: list[Any]) -> Any:
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf)
        if isinstance(leaf, dist.ProcessGroup):
            return leaf
    names = [leaf for leaf in leaves if isinstance(leaf, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1]) if names else None


def _axis(group: Any) -> str:
    name = group.group_desc.removeprefix("mesh_")
    if name in ("default_pg", "default", "undefined", ""):
        whole = group.size() == dist.get_world_size()
        return "world" if whole else f"{group.size()} ranks"
    return str(name)


def _named_axes(axes: Iterable[str]) -> dict[str, str]:
    """The names of axes; one as large as the world is the default group, and a mesh knows it."""
    named = {axis: axis for axis in axes}
    if "world" in named:
        names: set[str] = set()
        for mesh in gc.get_objects():
            if type(mesh) is dist.DeviceMesh and mesh.mesh_dim_names:
                size = dist.get_world_size()
                names |= {n for i, n in enumerate(mesh.mesh_dim_names) if mesh.size(i) == size}
        named["world"] = "=".join(sorted(names)) or "world"
    return named


def _reductions(model: nn.Module) -> Iterator[torch.dtype]:
    """The dtypes in which FSDP is asked to reduce a model's gradients."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        asked: Any = state()._mp_policy if state else getattr(module, "mixed_precision", None)
        if isinstance(getattr(asked, "param_dtype", 0), torch.dtype | None):
            asked = asked.reduce_dtype or asked.param_dtype
            own = next(module.parameters(), None)
            if asked is None and own is not None:
                asked = own.dtype
            if asked is not None:
                yield asked
