"""Build the wheel, unpack it elsewhere and use it from there, without this checkout on the path.

The wheel's dependencies are taken from the environment that runs this; the package itself is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import pathlib, sys
import halfstep
assert pathlib.Path(halfstep.__file__).is_relative_to(sys.argv[1]), halfstep.__file__
assert "torch" not in sys.modules
from halfstep.trainer.config.config import shipped_configs
assert "gpt-tiny" in shipped_configs()
for name in dir(halfstep):
    getattr(halfstep, name)
package = pathlib.Path(halfstep.__file__).parent
for source in ("optim/kernels/cpu.cpp", "kernels/attention.cpp", "kernels/vectors.h"):
    assert (package / source).is_file(), source
print("wheel: imports, public names and configurations are there:", halfstep.__version__)
"""


def main() -> None:
    """Exit non-zero if the built wheel cannot be imported or lacks a file."""
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("halfstep-*.whl")
        site = Path(folder) / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        # The first entry of the path wins over the editable install of the environment.
        environment = {**os.environ, "PYTHONPATH": str(site)}
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(site)], check=True, cwd=folder, env=environment
        )


if __name__ == "__main__":
    main()
