"""Matrix products of linear layers below 16 bits; loaded where a policy has a recipe."""

from typing import Any

import lazy_loader

_attach: tuple[Any, Any, Any] = lazy_loader.attach_stub(__name__, __file__)
__getattr__, __dir__, __all__ = _attach
