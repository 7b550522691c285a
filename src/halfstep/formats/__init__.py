"""Number formats as values: single numbers (``floats``), and blocks that share a scale.

The public names are listed in ``__init__.pyi``; each is loaded on first use.
"""

from typing import Any

import lazy_loader

_attach: tuple[Any, Any, Any] = lazy_loader.attach_stub(__name__, __file__)
__getattr__, __dir__, __all__ = _attach
