"""Optimizers over low-precision weights; each name of ``__init__.pyi`` is loaded when used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
