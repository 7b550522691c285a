"""Matrix products of linear layers below 16 bits; loaded where a policy has a recipe."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
