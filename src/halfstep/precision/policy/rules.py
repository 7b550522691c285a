"""Applies a policy's rules to a model: which module is kept in which format.

A rule is a pattern and a format: ``("*.norm*", "fp32")``. The pattern is a glob over the module's
qualified name (``*`` matches dots too), or ``type:`` and a glob over the name of its class. For
every module::

    rules match the module itself    the last of them decides
    no rule matches it               its parent's format holds; for the root, the policy's

So a rule on a module also holds for its submodules, a rule that matches a submodule overrides it
there whatever their order, and among rules that match the same module the last one wins.

``FormatRegion`` in ``casting/cast.py`` defines what "fp32" means for a module. A module that uses
its submodules' weights without calling them (``torch.nn.MultiheadAttention``) cannot be divided.

A recipe, of the policy or a rule, holds for the linear layers that are called as modules: not for
those inside ``torch.nn.MultiheadAttention``, and not for one whose weight an embedding shares,
unless a rule names that layer itself.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

import halfstep.formats as formats
from halfstep.errors import PrecisionError
from halfstep.precision.policy.policy import PrecisionPolicy, dtype_name
from halfstep.precision.policy.recipe import PRODUCTS, SCHEMES, Recipe, is_recipe, parse_recipe


@dataclass(frozen=True, slots=True)
class Placement:
    """What the rules say about one module."""

    name: str  # its qualified name, one of several where a module is shared
    module: nn.Module
    fp32: bool  # whether a rule keeps it in fp32; otherwise it is in the policy's own format
    rule: str  # the pattern that decided, ``""`` if none did
    direct: bool  # whether that pattern matches the module itself
    # whether the module that calls it is kept in fp32: its nearest ancestor with a forward (a
    # ``ModuleList`` has none)
    around_fp32: bool
    # the recipe of the module's products, if it is a linear layer below 16 bits
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A policy's rules resolved on a model; :func:`place` makes it, once for all users."""

    policy: PrecisionPolicy
    model: nn.Module
    # every module, a shared one under each of its names; parents first
    modules: tuple[Placement, ...]
    # the modules that a recipe is meant for and does not reach, since they multiply by their own
    # weights and call no linear layer: experts of a mixture, and torch's attention
    unreached: tuple[str, ...]

    @property
    def regions(self) -> list[Placement]:
        """The modules that must switch format themselves: those that get a ``FormatRegion``."""
        if not self.policy.rules or self.policy.compute_dtype == torch.float32:
            return []
        return [placement for placement in self.modules if needs_region(placement)]

    @property
    def low(self) -> list[Placement]:
        """The linear layers that multiply below 16 bits; each once, under its first name."""
        found = {id(p.module): p for p in reversed(self.modules) if p.recipe}
        return list(reversed(found.values()))

    def kept(self) -> set[str]:
        """Names of the parameters that rules keep in fp32."""
        if not self.policy.rules:
            return set()
        modules = (placement.module for placement in self.modules if placement.fp32)
        kept = {id(parameter) for module in modules for parameter in module._parameters.values()}
        return {name for name, p in self.model.named_parameters() if id(p) in kept}

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which the model stores each floating parameter, by its name."""
        kept = self.kept()
        return {
            name: torch.float32 if name in kept else self.policy.param_dtype
            for name, parameter in self.model.named_parameters()
            if parameter.is_floating_point()
        }


def place(policy: PrecisionPolicy, model: nn.Module) -> PlacedModel:
    """Resolve the rules for every module; the model is not changed."""
    named = list(model.named_modules(remove_duplicate=False))
    if policy.rules:
        _require_matches(policy, named)
    found: dict[str, Placement] = {}
    recipes: dict[str, Recipe] = {}
    unreached: dict[int, str] = {}
    for name, module in named:
        if isinstance(module, torch.jit.ScriptModule):
            raise PrecisionError(
                f"{name or 'the model'} is a torch.jit module, whose operations cannot be cast; "
                "use the module that it was made of, or torch.compile of that"
            )
        outer = name.rpartition(".")[0]
        above = found[outer] if name else None
        pattern, fp32, recipe = "", policy.compute_dtype == torch.float32, policy.recipe
        if above is not None:
            pattern, fp32, recipe = above.rule, above.fp32, recipes[outer]
        matching = [rule for rule in policy.rules if matches(rule[0], name, module)]
        if matching:
            pattern, form = matching[-1]
            fp32 = form == "fp32"
            recipe = parse_recipe(form) if is_recipe(form) else Recipe()
        around = fp32
        if above is not None:
            runs = not above.name or has_forward(above.module)
            around = above.fp32 if runs else above.around_fp32
        # what is inside of this module uses its weights without calling it
        recipes[name] = Recipe() if isinstance(module, nn.MultiheadAttention) else recipe
        if recipe and (has_stacks(module) or isinstance(module, nn.MultiheadAttention)):
            unreached.setdefault(id(module), name or "the model")
        low = recipes[name] if is_linear(module) else Recipe()
        found[name] = Placement(name, module, fp32, pattern, bool(matching), around, low)
    placements = list(found.values())
    if policy.recipes():
        placements = _check_recipes(policy, placements)
    if policy.rules:
        _check_shared(policy, placements)
    return PlacedModel(policy, model, tuple(placements), tuple(unreached.values()))


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer by torch's own forward, or transformers' ``Conv1D``."""
    kind = type(module)
    return kind.forward is nn.Linear.forward or (
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    )


def has_stacks(module: nn.Module) -> bool:
    """Whether a module has stacks of matrices of its own, as experts have, to multiply by."""
    weights = [] if isinstance(module, nn.modules.conv._ConvNd) else module._parameters.values()
    return any(w is not None and w.dim() == 3 and 1 not in w.shape for w in weights)


def _check_recipes(policy: PrecisionPolicy, placements: list[Placement]) -> list[Placement]:
    """The placements without recipes for heads that share an embedding's weight."""
    tables = {
        id(p.module.weight) for p in placements if isinstance(p.module, nn.Embedding)
    }  # fmt: skip
    result = []
    for p in placements:
        shares = bool(p.recipe) and id(p.module.weight) in tables and not p.direct
        result.append(dataclasses.replace(p, recipe=Recipe()) if shares else p)
    low: dict[int, Placement] = {}
    for p in result:
        if p.recipe and low.setdefault(id(p.module), p).recipe != p.recipe:
            first = low[id(p.module)]
            raise PrecisionError(
                f"the module that is both {first.name} and {p.name} has recipe {first.recipe} "
                f"under the one name and {p.recipe} under the other; give both names one rule"
            )
    if not low:
        raise PrecisionError(
            f"policy {policy} has formats below 16 bits for linear layers, and none of the model's "
            "is a torch.nn.Linear that is called, keeps its forward, and shares no embedding's "
            "weight"
        )
    _check_blocks(list(low.values()))
    return result


def _check_blocks(low: list[Placement]) -> None:
    """Refuse layers whose features do not fill whole blocks; tokens are padded by zeros."""
    found = [(p, unfilled(p.module, m, getattr(p.recipe, m))) for p in low for m in PRODUCTS]
    wrong = [(p, why) for p, why in found if why]
    if not wrong:
        return
    first, why = wrong[0]
    names = list(dict.fromkeys(p.name for p, _ in wrong))
    others = f" (and {len(names) - 1} more layers do)" if len(names) > 1 else ""
    # one pattern for the same layer of all blocks
    globs = names if len(names) == 1 else [re.sub(r"\.\d+(?=\.)", ".*", name) for name in names]
    keep = "|".join(dict.fromkeys(globs)) or "*"
    raise PrecisionError(f"{first.name or 'the model'} {why}{others}; keep it by keep_bf16={keep}")


def unfilled(layer: Any, product: str, form: str) -> str:
    """Which features of a linear layer do not fill whole blocks in a product; empty if all do."""
    scheme = SCHEMES.get(form)
    if scheme is None or product == "wgrad":
        return ""
    by_rows = type(layer).forward is nn.Linear.forward
    outputs, inputs = layer.weight.shape if by_rows else layer.weight.shape[::-1]
    rows, columns = formats.BLOCK_FORMATS[scheme.weights].block or (1, 1)
    summed = product == "fprop"  # over inputs; the rows of square blocks lie along the others
    for width, what, size in (
        (inputs, "inputs", columns if summed else rows),
        (outputs, "outputs", rows if summed else columns),
    ):
        if width % size:
            return f"has {width} {what}, and its {product} in {form} needs whole blocks of {size}"
    return ""


def matches(pattern: str, name: str, module: nn.Module) -> bool:
    """Whether a rule's pattern matches a module of this qualified name."""
    if pattern.startswith("type:"):
        return fnmatchcase(class_name(module), pattern.removeprefix("type:"))
    return fnmatchcase(name, pattern)


def class_name(module: nn.Module) -> str:
    """The name of a module's class; FSDP2 makes a class of its own from it, with a new name."""
    kind = type(module)
    return (kind.__bases__[-1] if hasattr(kind, "_get_fsdp_state") else kind).__name__


def root_is_fp32(policy: PrecisionPolicy, model: nn.Module) -> bool:
    """Whether a rule keeps the root in fp32, that is, operations outside all submodules."""
    matching = [form for pattern, form in policy.rules if matches(pattern, "", model)]
    return bool(matching) and matching[-1] == "fp32"


def needs_region(placement: Placement) -> bool:
    """Whether the module must switch format itself, since its caller may have another."""
    if not has_forward(placement.module):
        return False
    if not placement.fp32:
        return placement.around_fp32
    return placement.direct or next(placement.module.parameters(), None) is not None


def plain_name(name: str) -> str:
    """A name without what DistributedDataParallel and torch.compile put before it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called, unlike a ``ModuleList``."""
    return type(module).forward is not nn.Module.forward


def _require_matches(policy: PrecisionPolicy, named: list[tuple[str, nn.Module]]) -> None:
    for pattern, form in policy.rules:
        if any(matches(pattern, name, module) for name, module in named):
            continue
        glob = pattern.removeprefix("type:")
        what, known = "module", [name for name, _ in named if name]
        if glob != pattern:
            what, known = "class", sorted({class_name(module) for _, module in named})
        close = difflib.get_close_matches(glob, known, n=3, cutoff=0.4) or known[:3]
        hint = f"there are {', '.join(close)}" if close else "the model has no submodules"
        raise PrecisionError(f"rule {pattern!r} -> {form} matches no {what} of the model: {hint}")


def _check_shared(policy: PrecisionPolicy, placements: list[Placement]) -> None:
    """Refuse a shared module or tensor that is fp32 under one name and 16-bit under another."""
    compute = dtype_name(policy.compute_dtype)
    modules: dict[int, Placement] = {}
    owners: dict[int, tuple[str, bool]] = {}
    for placement in placements:
        module, name = placement.module, placement.name
        first, region = modules.setdefault(id(module), placement), needs_region(placement)
        inside = placement.fp32 != first.fp32 and (region or needs_region(first))
        if inside or (region and placement.around_fp32 != first.around_fp32):
            raise PrecisionError(
                f"the module that is both {first.name} and {name} is {'' if inside else 'called '}"
                f"in fp32 under the one name and in {compute} under the other; give both one rule"
            )
        if isinstance(module, nn.MultiheadAttention):
            _check_attention(placement, placements)
        if policy.param_dtype == torch.float32:
            continue
        for own, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point():
                continue
            full = f"{name}.{own}".removeprefix(".")
            other, fp32 = owners.setdefault(id(parameter), (full, placement.fp32))
            if fp32 != placement.fp32:
                raise PrecisionError(
                    f"{other} and {full} are one tensor, which rules keep in fp32 for the one and "
                    f"in {compute} for the other; give both modules the same rule"
                )


def _check_attention(attention: Placement, placements: list[Placement]) -> None:
    inside = f"{attention.name}." if attention.name else ""
    for placement in placements:
        if placement.name.startswith(inside) and placement.fp32 != attention.fp32:
            raise PrecisionError(
                f"rule {placement.rule or attention.rule!r} separates {placement.name} from "
                f"{attention.name or 'the model'}, a MultiheadAttention, which uses its weights "
                f"without calling it; write a rule for {attention.name or '*'} as a whole"
            )
