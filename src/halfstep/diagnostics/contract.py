"""The dtypes of a training program as rows: recorded, written as a file, and compared with it.

A row says that something is in a dtype: an operation of a module, a collective over an axis of the
mesh, a parameter, its gradient, a state of its optimizer, a buffer. Rows have no counts and no
shapes, and layers share theirs, so that another seed, batch, number of steps, of layers or of ranks
leaves them as they are. What such a change may bring or take away, as a sum over a batch of 1, is
no difference by itself; the same operation in another dtype always is.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as hooks
from torch.optim import Optimizer, optimizer as steps
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_leaves_with_path

from halfstep.diagnostics.module_calls import Location, ModuleCalls
from halfstep.diagnostics.nonfinite.operations import FILLS
from halfstep.diagnostics.trace import Ran, Tracker, is_product
from halfstep.errors import CheckpointError, DataError
from halfstep.files import parse_json, write_whole
from halfstep.precision.casting.autocast import SWITCHES, setting_of
from halfstep.precision.casting.op_table import OPS
from halfstep.precision.masters.local_part import storage_key
from halfstep.precision.policy.policy import dtype_name
from halfstep.shown import Finding, role

_FORMAT = 1
_WRAPPERS = re.compile(r"(?<![^.])(module|_(orig_mod|forward_module|\w+_wrapped_module))(\.|$)")
# These move values without rounding; what computes with the values has rows.
_MOVES = FILLS | {
    *("copy", "clone", "cat", "stack", "index", "index_select", "gather", "index_put", "repeat"),
    *("roll", "flip", "zero", "zeros", "ones", "eye", "arange", "linspace", "tril", "triu", "sort"),
    *("topk", "max", "min", "amax", "amin", "maximum", "minimum", "sign", "abs", "neg", "clamp"),
    *("clamp_min", "detach", "alias", "lift_fresh", "rand", "randn", "normal", "uniform"),
    *("bernoulli", "multinomial", "random", "exponential", "slice_backward", "select_backward"),
    *("embedding_dense_backward", "slice_scatter"),
}
# A model has these or has them not, whatever its batch.
_DECIDING = {"matmul", "attention", "softmax", "log_softmax", "embedding"} | {
    *(name for row in ("norm", "statistics", "loss") for name in OPS[row].names.split()),
}
_UNSCALES = "amp_foreach_non_finite_check_and_unscale"
_COLLECTIVE = re.compile(
    "(?:c10d|_c10d_functional)._?(all_?reduce|all_?gather|reduce_scatter|all_?to_?all|broadcast|"
    "gather|scatter|reduce|send|recv)"
)
_ENGINES = re.compile("/torch/(distributed/(fsdp|_composable|algorithms/ddp)|nn/parallel/)")
_ORDER = (  # causes before what follows from them
    *("switches", "parameters", "buffers", "operations", "gradients", "states", "collectives"),
    *("forward", "no_grad", "backward", "update"),
)
_WORDS = {"operations": 3, "collectives": 4}  # of a row
Row = tuple[str, str, str]
"""Section, what, and the dtype that it is in."""


class _Calls(ModuleCalls):
    """The forwards of all modules of a program, whoever calls them."""

    def __init__(self) -> None:
        super().__init__(nn.Module(), ended=lambda call, output: None)
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._owners: dict[int, str] = {}  # modules of parameters
        self.models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()

    def hook(self) -> None:
        """Register hooks on every module."""
        self._thread = threading.get_ident()
        self._handles = [
            hooks.register_module_forward_pre_hook(self.begin),
            hooks.register_module_forward_hook(self._end, always_call=True),
        ]

    def begin(self, module: nn.Module, args: Any) -> None:
        """Take the start of a forward; the first outermost one gives the modules their names."""
        if module not in self._names:
            self.models[module] = None
            alone = "" if any(True for _ in module.parameters()) else type(module).__name__
            for name, inner in module.named_modules():
                plain = self._names.setdefault(inner, _plain(name).rstrip(".") or alone)
                self._owners |= {id(p): plain for p in inner.parameters(recurse=False)}
        self._enter(self._names[module], module, args)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave(self._names.get(module, ""), module, args, output)

    def place(self, names: Mapping[int, tuple[str, bool]]) -> Location:
        """The location of the current operation, of which a gradient's hook is its module's."""
        found, top = super().place(names), self._running[-1] if self._running else None
        if found.node == "AccumulateGrad":
            leaf: Any = torch._C._current_autograd_node()
            return found._replace(module=self._owners.get(id(leaf.variable), ""))
        if top and found.direction == "forward" and not top.learns and top.task == -1:
            return found._replace(direction="no_grad")  # type: ignore[arg-type]
        return found

    def forget(self) -> None:
        """Forget the forwards that have ended, which no backward needs after a step."""
        self._calls.clear()


class contract(Tracker):  # type: ignore[no-untyped-call]
    """Records the dtypes of what a program runs, of its state and of what its ranks exchange.

    Enter it around some steps of any loop; :meth:`recorded` has the rows. It changes no bit of the
    steps, but what is compiled runs uncompiled.
    """

    lists = True

    def __init__(self) -> None:
        self.calls = _Calls()
        super().__init__(nn.Module(), self.calls)
        self.steps: dict[Optimizer, int] = {}
        self.before_step: Callable[[Optimizer], None] = lambda optimizer: None
        self.after_step: Callable[[], None] = lambda: None
        self._rows: dict[Row, set[str]] = defaultdict(set)
        self._handles: list[Any] = []
        self._stepping: list[Optimizer] = []
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
        warnings.filterwarnings("ignore", "Using `torch.compile.* global hooks")
        self.calls.hook()
        before = steps.register_optimizer_step_pre_hook(self._before)
        self._handles = [before, steps.register_optimizer_step_post_hook(self._after)]

    def close(self) -> None:
        """Leave the model and torch's optimizers as they were; what was recorded stays."""
        self.calls.unhook()
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._stepping:
            self.before_step(optimizer)
        if optimizer not in self._stepping:
            self._read(optimizer)
        self._stepping.append(optimizer)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping = self._stepping[:-1]  # it is empty where a closure began the recording
        if optimizer not in self._stepping:  # or it is the step of a base class
            self._read(optimizer)  # and what a closure and the step have made
        if not self._stepping:
            self.calls.forget()
            self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
            self.after_step()

    def _read(self, optimizer: Optimizer) -> None:
        """Make rows of the tensors that are there before or after a step."""
        named: dict[Tensor, str] = {}
        for model in self.calls.models:
            named = {p: _plain(name) for name, p in model.named_parameters()} | named
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point():
                    self._add("buffers", _plain(name), buffer)
            self._asked |= {dtype_name(asked) for asked in _reductions(model)}
        for group in optimizer.param_groups:
            named |= {p: "-" for p in group["params"] if p not in named}  # an engine's masters
        for parameter, name in named.items():
            self._add("parameters", name, parameter)
            if parameter.grad is not None:
                self._add("gradients", name, parameter.grad)
        for kept in optimizer.state.values():
            for path, value in tree_leaves_with_path(kept):
                if isinstance(value, Tensor):
                    self._add("states", ".".join(str(getattr(k, "key", k)) for k in path), value)

    def _add(self, section: str, name: str, tensor: Tensor) -> None:
        self._rows[section, role(name), dtype_name(tensor.dtype)].add(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(kind.__module__.startswith("torch.distributed") for kind in types):
            return NotImplemented  # a DTensor becomes what it runs on this rank
        self.exchanged(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def ran(self, one: Ran) -> None:
        """Make an operation a row, unless it only moves values or is an engine's own."""
        op, direction, inputs, node = one.op, one.direction, one.inputs, one.place.node
        if one.known.collective or op in _MOVES or (op != "cast" and node == "AccumulateGrad"):
            return  # several micro-batches add up, and gradients have rows of their own
        if op == "add" and one.given and one.given[-1].ndim == 1 < one.made[0].ndim:
            return  # the bias of a matmul, which torch adds apart for some shapes
        if op == "cast":
            inputs = inputs[-1:]
            if not inputs or one.given[-1].dtype.itemsize < one.made[0].dtype.itemsize:
                return  # what computes with the wider values has a row
        if direction == "update" and not self._stepping:
            direction = "no_grad"
        if is_product(op) and not op.startswith("attention"):
            op, inputs = "matmul", inputs[-2:]
        elif direction == "update" and op != "cast":
            op = "arithmetic"
        if not _of_an_engine():
            module = one.place.module or ("." if one.place.class_name else "-")
            forms = (" ".join(sorted({*some})) or "-" for some in (inputs, one.outputs))
            key = f"{direction}  {role(module)}  {op.replace('linalg_vector_norm', 'norm')}"
            self._rows["operations", key, " -> ".join(forms)].add(module)

    def exchanged(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make a collective a row, if it carries numbers between ranks."""
        found = _COLLECTIVE.match(str(func))
        leaves = tree_leaves((args, kwargs)) if found else []
        group = _group_of(leaves)
        if found is None or group is None or group.size() < 2:
            return
        kind = re.sub("^all(?!_)", "all_", found[1])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        when, what = self._purpose(kind, tensors)
        axis = group.group_desc.removeprefix("mesh_")
        if axis in ("default_pg", "default", "undefined", ""):
            whole = group.size() == dist.get_world_size()
            axis = "world" if whole else f"{group.size()} ranks"
        self._axes[axis] = group.size()
        for tensor in tensors:
            if tensor.is_floating_point() or what in ("gradients", "parameters"):
                key = f"{when}  {axis}  {kind}  {what}"
                self._rows["collectives", key, dtype_name(tensor.dtype)].add("")

    def _purpose(self, kind: str, tensors: list[Tensor]) -> tuple[str, str]:
        """When a collective runs, and what it carries."""
        place, engine = self.calls.place({}), _of_an_engine()
        if engine and kind in ("all_gather", "broadcast"):
            gathered = kind == "all_gather" or tensors[0].is_floating_point()
            return "any", "parameters" if gathered else "counts"
        if engine or place.node == "AccumulateGrad":
            return "backward", "gradients"
        if place.direction == "backward" or place.class_name:
            return place.direction, "activations"
        every = (p.grad for model in self.calls.models for p in model.parameters())
        grads = {storage_key(grad) for grad in every if grad is not None}
        what = "gradients" if any(storage_key(t) in grads for t in tensors) else "values"
        return "update" if self._stepping else "outside", what

    def recorded(self) -> Contract:
        """What was recorded so far, in this process."""
        many = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if many else 1
        named = _mesh_name(world) if "world" in self._axes else "world"
        rows: dict[Row, set[str]] = {
            (section, key.replace("  world  ", f"  {named}  "), form): where
            for (section, key, form), where in self._rows.items()
        }
        for backend, what in (switch for each in SWITCHES.values() for switch in each):
            rows["switches", f"fp32 {what} of {backend}", setting_of(backend, what)] = set()
        axes = {named if axis == "world" else axis: size for axis, size in self._axes.items()}
        rank, count = dist.get_rank() if many else 0, min(self.steps.values(), default=0)
        return Contract(rows, world, axes, _torch(), rank, count, sorted(self._asked))


@dataclass(frozen=True)
class Contract:
    """The dtypes of a program: of one rank, or of all."""

    rows: Mapping[Row, set[str]]  # to the modules or parameters concerned
    world: int
    axes: Mapping[str, int]  # over which the ranks exchanged numbers, to their sizes
    torch: str  # its version, which may change rows without a change of the program
    rank: int = 0
    steps: int = 0  # of each optimizer
    asked: Sequence[str] = ()  # in which dtypes FSDP is to reduce gradients

    @cached_property
    def forms(self) -> dict[tuple[str, ...], set[str]]:
        """The words of each row, its section first, to the dtypes that it is in."""
        found: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for section, key, form in self.rows:
            found[section, *key.split("  ")].add(form)
        return dict(found)

    def among(self, *words: str) -> set[str]:
        """The dtypes of all rows with these words; an empty one stands for any."""
        alike = (row for row in self.forms if all(w in ("", r) for w, r in zip(words, row)))  # noqa: B905
        return {form for row in alike for form in self.forms[row]}

    def lines(self) -> dict[str, list[str]]:
        """The rows by section, sorted, as the file holds them."""
        found: dict[str, list[str]] = {}
        for section, key, form in sorted(self.rows):
            found.setdefault(section, []).append(f"{key}: {form}")
        return found

    def write(self, path: str | Path, *names: str) -> None:
        """Write the file, one row a line, so that its changes read well in git.

        Args:
            path: Where to.
            *names: Attributes that are written besides, such as those that only one rank has.
        """
        told = {name: getattr(self, name) for name in ("world", "axes", "torch", *names)}
        text = {"format": _FORMAT, **told, "rows": self.lines()}
        text |= {"where": [sorted(self.rows[row]) for row in sorted(self.rows)]} if names else {}
        write_whole(Path(path), f"{json.dumps(text, indent=1, ensure_ascii=False)}\n")

    @classmethod
    def read(cls, path: str | Path) -> Contract:
        """Read a file.

        Raises:
            DataError: If there is none, or it is no contract, or one of another format.
        """
        hint = "write it with: halfstep contract record -- COMMAND"
        try:
            read = parse_json(Path(path).read_bytes(), str(path))
            if read.pop("format") != _FORMAT:
                raise ValueError
            lines = [(section, line) for section, some in read.pop("rows").items() for line in some]
            rows: list[Any] = [(section, *line.rsplit(": ", 1)) for section, line in lines]
            where, read["axes"] = read.pop("where", [()] * len(rows)), {**read["axes"]}
            if any(key.count("  ") != _WORDS.get(s, 1) - 1 for s, key, _ in rows):
                raise ValueError
            return cls({row: {*some} for row, some in zip(rows, where, strict=True)}, **read)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}; {hint}") from error
        except (CheckpointError, LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"not a contract in format {_FORMAT}, which this halfstep reads"
            raise DataError(f"{path}: {what}; {hint}") from error

    def findings(self) -> list[Finding]:
        """What is wrong without a file: gradients reduced in fewer bits than was asked for."""
        least, found = min(map(_bits, self.asked), default=0), []
        for section, key, form in sorted(self.rows):
            if section == "collectives" and key.endswith("gradients") and _bits(form) < least:
                _, axis, op, _ = key.split("  ")
                asked = " and ".join(self.asked)
                found.append(Finding(
                    level="fault", name="reduced_below_asked", where=(axis,),
                    what=f"gradients are reduced over {axis} in {form} ({op}); FSDP was asked for "
                    f"{asked}",
                    do="fully_shard norms, and what else is whole on all ranks of that axis, by "
                    "themselves with param_dtype=torch.float32",
                    values={"axis": axis, "dtype": form, "asked": self.asked},
                ))  # fmt: skip
        return found

    def differences(self, now: Contract) -> list[Finding]:
        """What is in another dtype now, each with the dtypes that went and came."""
        found = []
        for row in sorted({*self.forms, *now.forms}, key=_order):
            gone, come = self._changed(now, row)
            if gone or come:
                section, key = row[0], "  ".join(row[1:])
                where = {name for form in come for name in now.rows[section, key, form]}
                was, new = (" and ".join(sorted(c.forms.get(row, {"absent"}))) for c in (self, now))
                found.append(Finding(
                    level="fault", name=section, what=f"{key} is {new}, and was {was}",
                    where=tuple(sorted(where - {"", "-", "."})),
                    values={"row": key, "gone": sorted(gone), "new": sorted(come)},
                ))  # fmt: skip
        return found

    def _changed(self, now: Contract, row: tuple[str, ...]) -> tuple[set[str], set[str]]:
        """The dtypes of a row that went and came, but not what a batch or step may bring."""
        was, new = self.forms.get(row, set()), now.forms.get(row, set())
        gone, come = was - new, new - was
        section, first, *words = row
        known = bool(was and new) or section == "states"
        if section == "collectives":
            if self.world != now.world and not {*self.axes} & {*now.axes} & {words[0]}:
                return set(), set()  # an axis of one rank exchanges nothing
            known = known or words[-1] != "values"  # such as a loss that is printed
            return (gone, come) if known else (set(), come - self.among(section, "", words[0]))
        if section != "operations":
            return (gone, come) if known else (set(), come - self.among(section))
        module, op = words
        learns = first != "no_grad"
        deciding = learns and op.removesuffix("_backward").removesuffix("_forward") in _DECIDING
        if op == _UNSCALES:
            return gone, come
        if was:
            return (gone if deciding and now.among(section, first, module) else set()), come
        if not learns and (op, module) != ("cast", "-"):
            return set(), set()  # an evaluation
        here = self.among(section, first, module)
        if not here:  # another module: in a dtype in which no other runs this operation?
            elsewhere = self.among(section, first, "", op)
            return set(), come - elsewhere if elsewhere else set()
        dtypes = set() if deciding or op == "cast" else {d for form in here for d in form.split()}
        return set(), {form for form in come if not {*form.split()} <= dtypes}

    def text(self, now: Contract, names: str) -> str:
        """The differences as git shows them: what went, what came, and where."""
        lines, section, found = [], "", self.differences(now)
        for one in found:
            lines += [f" {one.name}"] * (one.name != section)
            lines += [f"  - {one.values['row']}: {form}" for form in one.values["gone"]]
            lines += [f"  + {one.values['row']}: {form}" for form in one.values["new"]]
            lines += [f"    {line}" for line in str(one).splitlines()[1:]]
            section = one.name
        if found and self.torch != now.torch:
            lines.append(f" note: torch {self.torch} wrote the file, and this is {now.torch}")
        if self.world != now.world and (missing := ", ".join(sorted({*self.axes} - {*now.axes}))):
            lines.append(f" note: {now.world} of {self.world} ranks ran, without {missing}")
        return "\n".join([f"{names}: {len(found)} of {len(self.forms)} rows differ", *lines])


def united(parts: list[Contract]) -> Contract:
    """The contract of all ranks; a row that only some have says which."""
    rows: dict[Row, set[str]] = {}
    for row in {row for part in parts for row in part.rows}:
        having = [part for part in parts if row in part.rows]
        ranks = {f"rank {part.rank}" for part in having} if len(having) < len(parts) else set()
        rows[row] = ranks.union(*(part.rows[row] for part in having))
    axes = {axis: size for part in parts for axis, size in part.axes.items()}
    asked = sorted({asked for part in parts for asked in part.asked})
    world, count = max(part.world for part in parts), min(part.steps for part in parts)
    return Contract(rows, world, axes, _torch(), 0, count, asked)


def _torch() -> str:
    return torch.__version__.partition("+")[0]


def _order(row: tuple[str, ...]) -> tuple[Any, ...]:
    return *(_ORDER.index(word) if word in _ORDER else -1 for word in row[:2]), row


def _plain(name: str) -> str:
    """A module's or parameter's name without those that wrappers add."""
    return _WRAPPERS.sub("", name)


def _bits(dtype: str) -> int:
    return int((re.findall(r"\d+", dtype) or [0])[0])


def _of_an_engine() -> bool:
    """Whether DDP or FSDP runs the operation, between it and the forward of a module."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        if _ENGINES.search(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _group_of(leaves: list[Any]) -> Any:
    """The process group among the arguments of a collective."""
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf)
    names: list[Any] = [leaf for leaf in leaves if isinstance(leaf, str)]
    return torch._C._distributed_c10d._resolve_process_group(names[-1]) if names else None


def _mesh_name(world: int) -> str:
    """The name of an axis as large as the world, which is the default group: a mesh knows it."""
    meshes: list[Any] = [o for o in gc.get_objects() if type(o) is DeviceMesh and o.mesh_dim_names]
    names = {n for m in meshes for i, n in enumerate(m.mesh_dim_names) if m.size(i) == world}
    return "=".join(sorted(names)) or "world"


def _reductions(model: nn.Module) -> Iterator[torch.dtype]:
    """The dtypes in which FSDP is asked to reduce a model's gradients."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        asked: Any = state()._mp_policy if state else getattr(module, "mixed_precision", None)
        own = next((p.dtype for p in module.parameters()), None)
        if hasattr(asked, "reduce_dtype"):
            yield from filter(None, [asked.reduce_dtype or asked.param_dtype or own])
