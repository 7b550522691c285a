"""Optimizers over low-precision weights and moments: AdamW, SGD, Lion and Muon.

The public names are listed in ``__init__.pyi``; each is loaded on first use, as a run with an
optimizer of torch's needs none.
"""

from typing import Any

import lazy_loader

_attach: tuple[Any, Any, Any] = lazy_loader.attach_stub(__name__, __file__)
__getattr__, __dir__, __all__ = _attach
