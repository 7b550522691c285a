"""Statistics of the tensors of a training step, and what other formats would make of them.

Reports load them on first use: few runs are watched.
"""

from typing import Any

import lazy_loader

_attach: tuple[Any, Any, Any] = lazy_loader.attach_stub(__name__, __file__)
__getattr__, __dir__, __all__ = _attach
