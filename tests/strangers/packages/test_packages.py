"""Programs of other people's packages under every policy."""

from __future__ import annotations

import importlib

import pytest

from every import every
from strangers.packages.cells import check

pytestmark = pytest.mark.strangers
MODULES = ("diffusion_models", "lora", "sft", "timm_models", "trainers", "transformer_models")


# 8-bit moments that go over to bf16 say so
@pytest.mark.filterwarnings("ignore:the second moments of:UserWarning")
@pytest.mark.parametrize("module", MODULES)
def test_every_policy_trains_it_or_refuses_it(module):
    programs = importlib.import_module(f"strangers.packages.{module}").PROGRAMS
    every(programs, check)
