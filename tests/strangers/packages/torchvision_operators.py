"""torchvision from PyPI beside a CPU build of torch: importable, without its compiled operators.

timm needs torchvision, and PyPI's wheel is compiled for torch with CUDA. Beside another torch its
library of operators does not load, and then ``import torchvision`` ends at a declaration that
belongs to two of them; with it ends whatever looks whether torchvision is there: transformers,
torchmetrics, Lightning. No program here uses these operators, so that declarations are enough.
"""

from __future__ import annotations

import importlib

import torch

_DECLARED = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> None:
    """Import torchvision, and declare those two only where its library does not load."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in _DECLARED:
            torch.library.define(f"torchvision::{name}", _SCHEMA)
        importlib.import_module("torchvision")
