"""Lists what the rest of the precision core uses of this folder; each is loaded on first use."""

from .linear import LowBitLinear as LowBitLinear
from .native import stays_bf16 as stays_bf16, why_not_native as why_not_native
