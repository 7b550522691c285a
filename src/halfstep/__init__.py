"""halfstep: mixed-precision training for PyTorch that accounts for every rounding and skip.

``__init__.pyi``, written by hand, lists the public names; each is imported on first use, so that
``import halfstep`` and ``halfstep --help`` do not wait for torch.
"""

import sys
from typing import Any

import lazy_loader

__version__ = "0.2.0.dev0"

_attach: tuple[Any, Any, Any] = lazy_loader.attach_stub(__name__, __file__)
_load, __dir__, __all__ = _attach
_TRAINER = ("Trainer", "TrainResult")


def __getattr__(name: str) -> Any:
    """Load the module of a public name when the name is first used, so that importing is fast."""
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if name not in _TRAINER or str(error.name).startswith(("halfstep", "torch")):
            raise
        hint = f"halfstep.{name} needs {error.name}: pip install 'halfstep[train]'"
        if error.name in sys.stdlib_module_names:  # fcntl, resource
            hint = f"halfstep.{name} needs {error.name}, which Python has on Linux and macOS only"
        raise ModuleNotFoundError(hint, name=error.name) from error
