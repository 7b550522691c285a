"""Recipes: the formats below 16 bits in which a linear layer multiplies, product by product.

A linear layer multiplies three times in a step, and each operand is rounded along the dimension
that its product sums over::

    fprop    y  = x w^T    input and weight, along the input features
    dgrad    dx = g w      gradient and weight, along the output features
    wgrad    dw = g^T x    gradient and input, along the tokens

A recipe names a scheme for each. It is written as one name for all three (``mxfp8``) or as three
separated by slashes (``bf16/nvfp4/nvfp4``: forward in bf16, backward in NVFP4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from halfstep.errors import PrecisionError

PRODUCTS = ("fprop", "dgrad", "wgrad")
OPERANDS = {
    "fprop": ("inputs", "weights"),
    "dgrad": ("gradients", "weights"),
    "wgrad": ("gradients", "inputs"),
}
"""The operands of each product of a linear layer, as :class:`Scheme` names their formats."""
KEPT = "bf16"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the operands of a product are rounded: one row of :data:`SCHEMES`."""

    name: str
    inputs: str  # the name of the format of inputs, an entry of halfstep.formats
    weights: str
    gradients: str
    block: int  # how many numbers of one row share a scale; 1 where the whole tensor does
    stochastic: bool = False  # whether gradients are rounded stochastically
    # whether a random 16 x 16 Hadamard matrix mixes the tokens of the operands of wgrad first,
    # which spreads outliers and cancels in the product
    hadamard: bool = False
    since: tuple[int, int] = (8, 9)  # the first CUDA capability whose tensor cores scale so
    until: tuple[int, int] = (99, 0)  # and the first again that does not
    source: str = ""

    @property
    def group(self) -> int:
        """How many numbers tensor cores sum over at once: whole blocks, and whole 16 bytes."""
        return max(self.block, 32 if self.inputs == "nvfp4" else 16)


_BLACKWELL, _HOPPER = (10, 0), (9, 0)
_NVFP4 = Scheme(
    "nvfp4", "nvfp4", "nvfp4-2d", "nvfp4", 16, stochastic=True, hadamard=True, since=_BLACKWELL,
    source="arXiv 2509.25149, sections 3 and 4",
)  # fmt: skip
SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8", "fp8", "fp8", "fp8-e5m2", 1, source="arXiv 2209.05433; torchao float8"),
        Scheme(
            "fp8-block", "fp8-block", "fp8-block-2d", "fp8-block", 128, since=_HOPPER,
            until=_BLACKWELL, source="arXiv 2412.19437, section 3.3",
        ),
        Scheme("mxfp8", "mxfp8", "mxfp8", "mxfp8", 32, since=_BLACKWELL, source="arXiv 2506.08027"),
        Scheme(
            "mxfp8-e5m2", "mxfp8", "mxfp8", "mxfp8-e5m2", 32, since=_BLACKWELL,
            source="OCP MX 1.0; NVIDIA-NeMo/Megatron-Bridge#638 diverged with it",
        ),
        _NVFP4,
        replace(_NVFP4, name="nvfp4-nearest", stochastic=False),
        replace(_NVFP4, name="nvfp4-unmixed", hadamard=False),
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
        for product in PRODUCTS:
            scheme = getattr(self, product)
            if scheme != KEPT and scheme not in SCHEMES:
                allowed = ", ".join([KEPT, *SCHEMES])
                raise PrecisionError(f"{product}={scheme}; allowed: {allowed}")

    def __bool__(self) -> bool:
        return self != Recipe()

    def __str__(self) -> str:
        schemes = [getattr(self, product) for product in PRODUCTS]
        return schemes[0] if len(set(schemes)) == 1 else "/".join(schemes)

    def schemes(self) -> list[Scheme]:
        """The schemes below 16 bits that it names, each once."""
        named = dict.fromkeys(getattr(self, product) for product in PRODUCTS)
        return [SCHEMES[name] for name in named if name in SCHEMES]


def parse_recipe(text: str) -> Recipe:
    """A recipe from its text: one scheme for all products, or three."""
    parts = [part.strip() for part in text.split("/")]
    if len(parts) not in (1, len(PRODUCTS)):
        raise PrecisionError(
            f"recipe {text!r} names {len(parts)} schemes; allowed: one for all products, or "
            f"three as {'/'.join(PRODUCTS)}"
        )
    return Recipe(*(parts * len(PRODUCTS) if len(parts) == 1 else parts))


def is_recipe(text: str) -> bool:
    """Whether a rule's format is meant as a recipe, and not as a dtype."""
    return "/" in text or text in SCHEMES
