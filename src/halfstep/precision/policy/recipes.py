"""Recipes: which format below 16 bits each operand of a linear layer's three products has.

A linear layer y = x W^T has the product ``fprop``, and backward, from the gradient g of its
output, ``dgrad`` (g W, for what came before) and ``wgrad`` (g^T x). Every operand is rounded in
blocks along the dim that its product contracts, so that a tensor is rounded twice, in two ways.

**Source:** ``fp8``: Micikevicius et al., arXiv 2209.05433, 3 (e5m2 for gradients); ``fp8-block``:
DeepSeek-V3, arXiv 2412.19437, 3.3 (1x128, weights 128x128); ``mxfp8``: Mishra et al., arXiv
2506.08027 (e4m3 everywhere, scales up); ``nvfp4``: arXiv 2509.25149, 4 and appendix C (16x16 for
weights, stochastic rounding of gradients, a random Hadamard transform of both operands of wgrad).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfstep.errors import PrecisionError
from halfstep.formats import BLOCK_FORMATS, BlockFormat

Product = Literal["fprop", "dgrad", "wgrad"]


@dataclass(frozen=True, slots=True)
class Operands:
    """The formats of one product's operands, and how they are rounded.

    Attributes:
        left: Of x in ``fprop``, of g in ``dgrad`` and of g^T in ``wgrad``.
        right: Of W^T, of W and of x.
        stochastic: Whether the left operand is rounded stochastically.
        hadamard: Whether both operands are rotated along the contracted dim first, 16 numbers at a
            time, which spreads outliers and leaves the product as it is.
    """

    left: BlockFormat
    right: BlockFormat
    stochastic: bool = False
    hadamard: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """The three products of a linear layer; None for one that stays in the compute format."""

    name: str
    fprop: Operands | None
    dgrad: Operands | None
    wgrad: Operands | None


def _recipe(name: str, x: str, weight: str, gradient: str, **gradients: bool) -> Recipe:
    form = BLOCK_FORMATS
    hadamard = gradients.pop("hadamard", False)
    return Recipe(
        name,
        Operands(form[x], form[weight]),
        Operands(form[gradient], form[weight], **gradients),
        Operands(form[gradient], form[x], hadamard=hadamard, **gradients),
    )


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe("fp8", "fp8", "fp8", "fp8-e5m2"),
        _recipe("fp8-block", "fp8-block", "fp8-block-2d", "fp8-block"),
        _recipe("mxfp8", "mxfp8", "mxfp8", "mxfp8"),
        _recipe("nvfp4", "nvfp4", "nvfp4-2d", "nvfp4", stochastic=True, hadamard=True),
    )
}
"""The published recipes by name."""


def parse_recipe(name: Recipe | str) -> Recipe:
    """A recipe by its name.

    Raises:
        PrecisionError: If there is none of that name; the message lists all.
    """
    if isinstance(name, Recipe):
        return name
    if name not in RECIPES:
        raise PrecisionError(f"there is no recipe {name!r}; allowed: {', '.join(RECIPES)}")
    return RECIPES[name]
