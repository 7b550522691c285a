"""halfstep: mixed-precision training for PyTorch that accounts for every rounding and skip.

``__init__.pyi``, written by hand, lists the public names; each is imported on first use, so that
``import halfstep`` and ``halfstep --help`` do not wait for torch.
"""

import lazy_loader

__version__ = "0.2.0.dev0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
