"""The mistakes of precision that can be seen in a training script: one table, one entry each.

An entry carries a script in which it is found and one in which it is not, which the tests run;
``words.toml`` says what is wrong, why, and the line to write instead. A rule is silent where it
cannot be sure: a scaler that other code gets, a branch that excludes the other, a name that no
optimizer trains.
"""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from halfstep.diagnostics.scripts.syntax import (
    Call,
    Script,
    cast_of,
    chain,
    dotted,
    last,
    low_format,
    values,
)
from halfstep.errors import DataError
from halfstep.words import Phrase, Told

_phrase = Told("halfstep.diagnostics.scripts").phrase


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake.

    Attributes:
        path: The file.
        line: Where in it, from 1; 0 for a finding about all of it.
        rule: The rule's name.
        what: What is wrong.
        why: What follows from it.
        instead: What to write.
    """

    path: str
    line: int
    rule: str
    what: str
    why: str
    instead: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.rule}: {self.what}; {self.why}. Write: {self.instead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of mistake.

    Attributes:
        name: Its name in reports.
        find: Yields the lines of a script where it is so.
        bad: A script in which it is found once.
        good: A script in which it is not.
    """

    name: str
    find: Callable[[Script], Iterator[int]]
    bad: str
    good: str

    @property
    def what(self) -> Phrase:
        """The mistake, as a clause; English until it is said."""
        return _phrase(f"what {self.name}")

    @property
    def why(self) -> Phrase:
        """The harm that it does to a run."""
        return _phrase(f"why {self.name}")

    @property
    def instead(self) -> Phrase:
        """The line to write in its place."""
        return _phrase(f"instead {self.name}")


def check_script(path: str | Path) -> list[Finding]:
    """Look for known mistakes of precision in a training script, which is read and never run.

    Args:
        path: A Python file.

    Returns:
        What was found, by line; empty for a script in which nothing is known to be wrong.

    Raises:
        DataError: If the file cannot be read, or is not Python.
    """
    if Path(path).suffix == ".ipynb":
        raise DataError(
            f"{path}: a notebook; allowed: Python, as jupyter nbconvert --to script writes it"
        )
    try:
        with tokenize.open(path) as file:  # in the encoding that the file says, with a BOM or not
            script = Script(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(
            f"{path}: cannot be read as Python: {error or type(error).__name__}"
        ) from error
    found = [
        Finding(str(path), line, rule.name, rule.what, rule.why, rule.instead)
        for rule in RULES
        for line in dict.fromkeys(rule.find(script))
    ]
    return sorted(found, key=lambda finding: finding.line)


def _clip_before_unscale(script: Script) -> Iterator[int]:
    for clip in script.calls:
        if last(clip.name) not in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
            continue
        near = [c for c in script.on_scaler("step") if c.scope == clip.scope]
        steps = [c for c in near if not c.excludes(clip) and c.order > clip.order]
        scales = [c for c in script.on_scaler("scale") if c.scope == clip.scope]
        scaled = any(not c.excludes(clip) and c.order < clip.order for c in scales)
        undone = [c for c in script.on_scaler("unscale_") if c.scope == clip.scope]
        if steps and scaled and not any(c.order < clip.order for c in undone):
            yield clip.line


def _scaler_not_saved(script: Script) -> Iterator[int]:
    saves = any(call.name == "torch.save" for call in script.calls)
    if (
        not (saves and script.made_scalers)
        or script.scaler_leaves
        or script.on_scaler("state_dict")
    ):
        return
    for call in script.calls:
        if call.method == "state_dict" and "optim" in last(call.receiver).lower():
            yield call.line
            return


def _never_updated(script: Script) -> Iterator[int]:
    if not script.made_scalers or script.scaler_leaves or script.on_scaler("update"):
        return
    for call in script.on_scaler("step")[:1]:
        yield call.line


def _stepped_by_hand(script: Script) -> Iterator[int]:
    """``optimizer.step()`` on gradients that a scaler has scaled, in the same function."""
    if script.scaler_leaves or script.on_scaler("step"):
        return
    for scale in script.on_scaler("scale"):
        for step in script.calls:
            optimizer = step.method == "step" and "optim" in last(step.receiver).lower()
            if optimizer and step.scope == scale.scope and not step.excludes(scale):
                yield step.line


def _backward_inside(script: Script) -> Iterator[int]:
    for call in script.calls:
        if call.method == "backward" and any(map(script.is_autocast, call.contexts)):
            yield call.line


def _schedule_over_skips(script: Script) -> Iterator[int]:
    for step in script.on_scaler("step"):
        for call in script.calls:
            name = last(call.receiver).lower()
            schedule = call.method == "step" and ("sched" in name or name == "lr_scheduler")
            beside = call.scope == step.scope and call.loop == step.loop != 0
            always = beside and not call.excludes(step) and not set(call.arms) - set(step.arms)
            if schedule and always and call.order > step.order:
                yield call.line


def _half_with_scaler(script: Script) -> Iterator[int]:
    if not script.on_scaler("step") or _trains_a_part(script):
        return
    for _, form, line in script.low_models():
        if form == "fp16":
            yield line


def _pure_bf16(script: Script) -> Iterator[int]:
    if _trains_a_part(script):
        return
    for _, form, line in script.low_models():
        if form == "bf16":
            yield line


def _scaler_with_bf16(script: Script) -> Iterator[int]:
    if script.scaler_leaves or not script.autocasts or not script.on_scaler("scale"):
        return
    if not all("bf16" in _formats(call) for call in script.autocasts):
        return
    for part in (part for _, value, _ in script.assigned for part in ast.walk(value)):
        if isinstance(part, ast.Call) and last(dotted(part.func)) == "GradScaler":
            if any(k.arg != "init_scale" for k in part.keywords):
                continue  # enabled= may say when there is none
            yield part.lineno


def _fp16_without_scaler(script: Script) -> Iterator[int]:
    lower = script.source.lower()
    if any(word in lower for word in ("scaler", "loss_scale", "accelerat")):
        return
    backward = [call for call in script.calls if call.method == "backward"]
    for call in script.autocasts:
        older = call.name == "torch.cuda.amp.autocast" and not call.node.args  # fp16 by default
        given = values(call.node, "dtype")
        if not ("fp16" in _formats(call) or (older and not given)):
            continue
        if any(c.scope == call.scope or _inside(call.node, c.contexts) for c in backward):
            yield call.line
            return


def _formats(autocast: Call) -> list[str]:
    """The dtype that is written in an autocast, if it is."""
    return [low_format(v) for v in [*values(autocast.node, "dtype"), *autocast.node.args[1:2]]]


def _inside(node: ast.AST, contexts: tuple[ast.expr, ...]) -> bool:
    return any(node is part for context in contexts for part in ast.walk(context))


def _eps_underflows(script: Script) -> Iterator[int]:
    low = {name for name, form, _ in script.low_models() if form == "fp16"}
    for optimizer, name in script.trained():
        if name in low and "Adam" in last(optimizer.name):
            given = values(optimizer.node, "eps")
            eps = given[0].value if given and isinstance(given[0], ast.Constant) else None
            if not given or (isinstance(eps, float | int) and eps < 2.0**-25):
                yield optimizer.line


_POSITIONS = frozenset({"inv_freq", "position_ids", "positions", "pos_ids", "freqs"})
_EXACT = {"fp16": 2048, "bf16": 256}
"""Up to which whole numbers a format holds every one: 2^11 and 2^8, from its mantissa bits."""


def _low_positions(script: Script) -> Iterator[int]:
    for call in script.calls:
        form = cast_of(call.node)
        if form and last(call.receiver) in _POSITIONS:
            yield call.line
        elif call.name == "torch.arange":
            form = next(filter(None, map(low_format, values(call.node, "dtype"))), "")
            if form and not _small_range(call.node, _EXACT[form]):
                yield call.line
        elif form and isinstance(call.node.func, ast.Attribute):
            inner = call.node.func.value
            counts = isinstance(inner, ast.Call) and dotted(inner.func) == "torch.arange"
            if counts and not _small_range(inner, _EXACT[form]):
                yield call.line


def _small_range(call: ast.expr, limit: int) -> bool:
    """Whether all of arange's bounds are written out and within what the format holds."""
    given = call.args if isinstance(call, ast.Call) else []
    bounds = [a.value if isinstance(a, ast.Constant) else None for a in given]
    return all(isinstance(b, int | float) and abs(b) <= limit for b in bounds)


def _low_average(script: Script) -> Iterator[int]:
    """An average of weights that is made in 16 bits and updated there."""
    names = {
        target: part.lineno
        for target, value, _ in script.assigned
        for part in filter(cast_of, chain(value))
        if "ema" in last(target).lower().split("_") or last(target).lower().startswith("ema")
    }
    names |= {
        call.receiver: call.line
        for call in script.calls
        if cast_of(call.node) and "ema" in last(call.receiver).lower().split("_")
        and _is_statement(script, call.node)
    }  # fmt: skip
    updates = ("update", "update_parameters", "lerp_", "mul_", "add_")
    if any(call.method in updates for call in script.calls if "scaler" not in call.receiver):
        yield from names.values()


def _is_statement(script: Script, call: ast.Call) -> bool:
    return any(isinstance(n, ast.Expr) and n.value is call for n in ast.walk(script.tree))


def _low_sums(script: Script) -> Iterator[int]:
    """A running total that is made in 16 bits and added to."""
    makers = ("torch.zeros", "torch.tensor", "torch.zeros_like", "torch.empty")
    low = {
        target
        for target, value, _ in script.assigned
        if isinstance(value, ast.Call)
        and (
            (dotted(value.func) in makers and any(map(low_format, values(value, "dtype"))))
            or any(dotted(part.func) in makers for part in ast.walk(value)
                   if isinstance(part, ast.Call) and cast_of(value))
        )
    }  # fmt: skip
    for node in ast.walk(script.tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            added = any(
                cast_of(part) for part in ast.walk(node.value) if isinstance(part, ast.Call)
            )
            name = last(dotted(node.target)).lower()
            if dotted(node.target) in low or (added and "loss" in name):
                yield node.lineno


def _low_loss(script: Script) -> Iterator[int]:
    for call in script.calls:
        loss = last(call.name) in ("cross_entropy", "nll_loss", "binary_cross_entropy", "kl_div")
        if loss and any(cast_of(argument) for argument in call.node.args[:1]):
            yield call.line


def _trains_a_part(script: Script) -> bool:
    """Whether only some parameters may be trained, as with adapters: no cast is then judged."""
    words = ("peft", "lora", "requires_grad_(False", "requires_grad = False", "bitsandbytes",
             "halfstep", "deepspeed", "stochastic_rounding", "kahan", "fp32_params",
             "master")  # fmt: skip
    return any(word in script.source.lower() for word in map(str.lower, words))


_LOOP = """
import torch
model, optimizer = make()
scaler = torch.amp.GradScaler("cuda")
for x in data:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
"""
_STEP = "    scaler.step(optimizer)\n    scaler.update()\n"
_SAVE = 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()%s}, "c.pt")\n'
_CAST = """
import torch
from torch.optim import AdamW
model = Net()%s
optimizer = AdamW(model.parameters(), lr=1e-4%s)
"""

_SCALED = """scaler = torch.amp.GradScaler()
scaler.scale(model(x)).backward()
scaler.step(optimizer)
scaler.update()
"""

RULES: tuple[Rule, ...] = (
    Rule(
        name="clip-before-unscale",
        find=_clip_before_unscale,
        bad=_LOOP + "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n" + _STEP,
        good=_LOOP + "    scaler.unscale_(optimizer)\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n" + _STEP,
    ),
    Rule(
        name="scaler-not-saved",
        find=_scaler_not_saved,
        bad=_LOOP + _STEP + _SAVE % "",
        good=_LOOP + _STEP + _SAVE % ', "scaler": scaler.state_dict()',
    ),
    Rule(
        name="scaler-never-updated",
        find=_never_updated,
        bad=_LOOP + "    scaler.step(optimizer)\n",
        good=_LOOP + _STEP,
    ),
    Rule(
        name="scaled-step",
        find=_stepped_by_hand,
        bad=_LOOP + "    optimizer.step()\n",
        good=_LOOP + _STEP,
    ),
    Rule(
        name="backward-inside-autocast",
        find=_backward_inside,
        bad="import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n"
        "    loss = model(x)\n    loss.backward()\n",
        good="import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n"
        "    loss = model(x)\nloss.backward()\n",
    ),
    Rule(
        name="schedule-over-skips",
        find=_schedule_over_skips,
        bad=_LOOP + _STEP + "    scheduler.step()\n",
        good=_LOOP + "    before = scaler.get_scale()\n" + _STEP
        + "    if scaler.get_scale() >= before:\n        scheduler.step()\n",
    ),
    Rule(
        name="half-weights-under-a-scaler",
        find=_half_with_scaler,
        bad=_CAST % (".cuda().half()", ", eps=1e-4") + _SCALED,
        good=_CAST % (".cuda()", "") + _SCALED,
    ),
    Rule(
        name="pure-bf16",
        find=_pure_bf16,
        bad=_CAST % (".to(torch.bfloat16)", ""),
        good=_CAST % (".to('cuda')", ""),
    ),
    Rule(
        name="scaler-with-bf16",
        find=_scaler_with_bf16,
        bad=_LOOP.replace("float16", "bfloat16").replace('GradScaler("cuda")', "GradScaler()")
        + _STEP,
        good=_LOOP + _STEP,
    ),
    Rule(
        name="fp16-without-scaler",
        find=_fp16_without_scaler,
        bad="import torch\nwith torch.autocast('cuda', dtype=torch.float16):\n"
        "    loss = model(x)\nloss.backward()\n",
        good=_LOOP + _STEP,
    ),
    Rule(
        name="eps-underflows",
        find=_eps_underflows,
        bad=_CAST % (".half()", ""),
        good=_CAST % (".half()", ", eps=1e-4"),
    ),
    Rule(
        name="positions-in-16-bits",
        find=_low_positions,
        bad="import torch\nt = torch.arange(length, dtype=torch.bfloat16)\n",
        good="import torch\nt = torch.arange(length, dtype=torch.float32)\n"
        "u = torch.arange(64, dtype=torch.bfloat16)\n",
    ),
    Rule(
        name="average-in-16-bits",
        find=_low_average,
        bad="import copy\nema = copy.deepcopy(model).half()\n"
        "for e, p in zip(ema.parameters(), model.parameters()):\n    e.mul_(0.999).add_(p)\n",
        good="import copy\nema = copy.deepcopy(model).float()\n"
        "for e, p in zip(ema.parameters(), model.parameters()):\n    e.mul_(0.999).add_(p)\n",
    ),
    Rule(
        name="sum-in-16-bits",
        find=_low_sums,
        bad="import torch\ntotal = torch.zeros((), dtype=torch.float16)\n"
        "for x in data:\n    total += model(x).detach()\n",
        good="import torch\ntotal = torch.zeros(())\n"
        "for x in data:\n    total += model(x).detach()\n",
    ),
    Rule(
        name="loss-in-16-bits",
        find=_low_loss,
        bad="from torch.nn import functional\nloss = functional.cross_entropy(logits.half(), y)\n",
        good="from torch.nn import functional\n"
        "loss = functional.cross_entropy(logits.float(), y)\n",
    ),
)  # fmt: skip
"""Every rule."""
