"""Recipes: the formats below 16 bits in which a linear layer multiplies, product by product.

A linear layer multiplies three times in a step, and each operand is rounded along the dimension
that its product sums over::

    fprop    y  = x w^T    input and weight, along the input features
    dgrad    dx = g w      gradient and weight, along the output features
    wgrad    dw = g^T x    gradient and input, along the tokens

A recipe names a scheme for each. It is written as one name for all three (``mxfp8``) or as three
separated by slashes (``bf16/nvfp4/nvfp4``: forward in bf16, backward in NVFP4). ``-`` leaves a
product as it is without this recipe.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.errors import PrecisionError

PRODUCTS = ("fprop", "dgrad", "wgrad")
OPERANDS = {
    "fprop": ("inputs", "weights"),
    "dgrad": ("gradients", "weights"),
    "wgrad": ("gradients", "inputs"),
}
"""The operands of each product of a linear layer, as :class:`Scheme` names their formats."""
KEPT, SAME = "bf16", "-"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the operands of a product are rounded: one row of :data:`SCHEMES`.

    Attributes:
        name: What users write.
        inputs: Name of the format of inputs, an entry of ``halfstep.formats``.
        weights: Name of the format of weights.
        gradients: Name of the format of gradients.
        block: How many numbers of one row share a scale; 1 where the whole tensor does.
        stochastic: Whether gradients are rounded stochastically.
        hadamard: Whether the operands of ``wgrad`` are multiplied by a random 16 x 16 Hadamard
            matrix along the tokens first, which spreads outliers and cancels in the product.
        native: What a device must multiply natively to need no simulation.
        since: The first CUDA compute capability whose tensor cores scale such blocks.
        source: Where the scheme is defined.
    """

    name: str
    inputs: str
    weights: str
    gradients: str
    block: int
    stochastic: bool = False
    hadamard: bool = False
    native: str = "fp8"
    since: tuple[int, int] = (8, 9)
    source: str = ""


_BLACKWELL, _HOPPER = (10, 0), (9, 0)


def _nvfp4(name: str, *, stochastic: bool = True, hadamard: bool = True) -> Scheme:
    return Scheme(
        name,
        inputs="nvfp4",
        weights="nvfp4-2d",
        gradients="nvfp4",
        block=16,
        stochastic=stochastic,
        hadamard=hadamard,
        native="fp4",
        since=_BLACKWELL,
        source="arXiv 2509.25149, sections 3 and 4",
    )


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8", "fp8", "fp8", "fp8-e5m2", 1, source="arXiv 2209.05433; torchao float8"),
        Scheme(
            "fp8-block", "fp8-block", "fp8-block-2d", "fp8-block", 128, since=_HOPPER,
            source="arXiv 2412.19437, section 3.3",
        ),
        Scheme("mxfp8", "mxfp8", "mxfp8", "mxfp8", 32, since=_BLACKWELL, source="arXiv 2506.08027"),
        Scheme(
            "mxfp8-e5m2", "mxfp8", "mxfp8", "mxfp8-e5m2", 32, since=_BLACKWELL,
            source="OCP MX 1.0; NVIDIA-NeMo/Megatron-Bridge#638 diverged with it",
        ),
        _nvfp4("nvfp4"),
        _nvfp4("nvfp4-nearest", stochastic=False),
        _nvfp4("nvfp4-unmixed", hadamard=False),
    )
}  # fmt: skip
"""Every scheme that a recipe may name."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The scheme of each of a linear layer's three products; by default all are kept in bf16."""

    fprop: str = KEPT
    dgrad: str = KEPT
    wgrad: str = KEPT

    def __post_init__(self) -> None:
        """Raise PrecisionError for a scheme that is none."""
        for product in PRODUCTS:
            scheme = getattr(self, product)
            if scheme not in (KEPT, SAME) and scheme not in SCHEMES:
                raise _no_scheme(scheme, product)

    def __bool__(self) -> bool:
        return self != Recipe()

    def __str__(self) -> str:
        schemes = [getattr(self, product) for product in PRODUCTS]
        return schemes[0] if len(set(schemes)) == 1 else "/".join(schemes)

    def schemes(self) -> list[Scheme]:
        """The schemes below 16 bits that it names, each once."""
        named = dict.fromkeys(getattr(self, product) for product in PRODUCTS)
        return [SCHEMES[name] for name in named if name in SCHEMES]

    def over(self, below: Recipe) -> Recipe:
        """This recipe where it names a scheme, and ``below`` where it leaves the product."""
        pairs = ((getattr(self, product), getattr(below, product)) for product in PRODUCTS)
        return Recipe(*(kept if mine == SAME else mine for mine, kept in pairs))


def parse_recipe(value: object) -> Recipe:
    """A recipe from its text, or from a table of products such as ``{fprop = "bf16"}``.

    Raises:
        PrecisionError: For a scheme or product that is unknown, or more than three of them.
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, dict):
        for product in value:
            if product not in PRODUCTS:
                close = difflib.get_close_matches(str(product), PRODUCTS, n=1)
                hint = f", did you mean {close[0]!r}?" if close else ""
                raise PrecisionError(
                    f"unknown product {product!r}{hint} Allowed: {', '.join(PRODUCTS)}; if it is "
                    "part of a glob with dots, put the glob in quotes"
                )
        return Recipe(*(str(value.get(product, SAME)).strip() for product in PRODUCTS))
    parts = [part.strip() for part in str(value).split("/")]
    if len(parts) not in (1, len(PRODUCTS)):
        raise PrecisionError(
            f"recipe {str(value)!r} names {len(parts)} schemes; allowed: one for all products, or "
            f"three as {'/'.join(PRODUCTS)}"
        )
    return Recipe(*(parts * len(PRODUCTS) if len(parts) == 1 else parts))


def is_recipe(text: str) -> bool:
    """Whether a rule's format is meant as a recipe, and not as a dtype."""
    return "/" in text or text in SCHEMES or text == SAME


def _no_scheme(name: str, product: str) -> PrecisionError:
    close = difflib.get_close_matches(name, [KEPT, *SCHEMES], n=1)
    hint = f", did you mean {close[0]!r}?" if close else ";"
    return PrecisionError(f"{product}={name}{hint} Allowed: {KEPT}, {', '.join(SCHEMES)}")
