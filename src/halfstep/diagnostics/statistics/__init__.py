"""Statistics of a step's tensors; reports load them on first use: few runs are watched."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
