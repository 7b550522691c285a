"""Plain torch models; each gives ``loss_sum(batch)``, ``tp_plan()`` and ``blocks()``."""

from halfstep.models.cross_entropy import linear_cross_entropy_sum
from halfstep.models.generate import generate
from halfstep.models.gpt import GPT
from halfstep.models.gpt_config import GPT_SIZES, GPTConfig
from halfstep.models.hf import load_gpt2, save_gpt2

__all__ = [
    "GPT",
    "GPT_SIZES",
    "GPTConfig",
    "generate",
    "linear_cross_entropy_sum",
    "load_gpt2",
    "save_gpt2",
]
