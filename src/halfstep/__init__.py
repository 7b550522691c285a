"""halfstep: mixed-precision training for PyTorch that accounts for every number on the way.

The public names stand, written by hand, in ``__init__.pyi``; each is loaded on first use, so that
``import halfstep`` and ``halfstep --help`` do not wait for torch.
"""

from typing import Any

import lazy_loader

__version__ = "0.1.0"

_attach: tuple[Any, Any, Any] = lazy_loader.attach_stub(__name__, __file__)
__getattr__, __dir__, __all__ = _attach
