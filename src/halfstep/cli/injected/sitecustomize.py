"""Lets ``halfstep contract`` see an unchanged program, from the moment that this imports torch.

The folder of this file is first on the program's PYTHONPATH, so that Python imports it at its
start. A ``sitecustomize`` that it hides is imported as well.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path


class _AfterTorch:
    """Finds torch as Python does, and begins to listen once that has been imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Return torch's spec, and None for all else."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def then_listen(module: object) -> None:
            execute(module)  # type: ignore[arg-type]
            try:
                importlib.import_module("halfstep.cli.listening").listen()
            except ModuleNotFoundError as error:
                print(f"halfstep contract: {error} in {sys.executable}", file=sys.stderr)

        spec.loader.exec_module = then_listen  # type: ignore[assignment, method-assign]
        return spec


sys.meta_path.insert(0, _AfterTorch())  # type: ignore[arg-type]
_HERE = str(Path(__file__).parent)
_hidden = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if path != _HERE]
)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
