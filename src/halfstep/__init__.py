"""halfstep: mixed-precision training for PyTorch that accounts for every number on the way.

The public names stand, written by hand, in ``__init__.pyi``; each is loaded on first use, so that
``import halfstep`` and ``halfstep --help`` do not wait for torch.
"""

import importlib
import sys
from typing import Any

import lazy_loader

__version__ = "0.2.0.dev0"

_attach: tuple[Any, Any, Any] = lazy_loader.attach_stub(__name__, __file__)
_load, __dir__, __all__ = _attach
_TRAINER = ("Trainer", "TrainResult")


def __getattr__(name: str) -> Any:
    """Load a public name, and see that this torch is one that it can work with."""
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if name not in _TRAINER or str(error.name).startswith(("halfstep", "torch")):
            raise
        hint = f"halfstep.{name} needs {error.name}: pip install 'halfstep[train]'"
        if error.name in sys.stdlib_module_names:  # fcntl, resource
            hint = f"halfstep.{name} needs {error.name}, which Python has on Linux and macOS only"
        raise ModuleNotFoundError(hint, name=error.name) from error
    finally:  # before the name is used, or the ImportError told: the cause is torch's
        if name in __all__:
            _require_torch(name)


def _require_torch(name: str) -> None:
    # By name, and not before torch: the errors, to be caught, are to be had without it.
    if "torch" in sys.modules and not name.endswith("Error"):
        importlib.import_module("halfstep.torch_version").require_torch(name)
