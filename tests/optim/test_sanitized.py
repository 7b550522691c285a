"""The kernels' own tests, in a build that stops at what AddressSanitizer and UBSan see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ("tests/forward_kernels", "tests/optim/test_native.py", "tests/optim/test_moments.py",
           "tests/optim/test_norm.py", "tests/optim/test_optimizers.py")  # fmt: skip
LIED_TO = """
import torch
from halfstep.kernels.library import library
from halfstep.optim.kernels.cpu import native_kernel
x, n = torch.zeros(100, dtype=torch.bfloat16), 100
if "{fault}" == "beyond the end":
    library().halfstep_gelu_tanh(x.data_ptr(), None, x.data_ptr(), n + 1, 1)
else:
    import ctypes
    one = (ctypes.c_void_p * 1)(torch.zeros(9).data_ptr() + 1)
    native_kernel()._square_sum(one, (ctypes.c_int64 * 1)(8), (ctypes.c_int32 * 1)(0), 1, 1)
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """Runs Python with kernels that are built anew; torch and Python themselves are as ever."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++, whose sanitizers these are")

    def where(name: str) -> str:
        told = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True
        )
        return told.stdout.strip()

    if not Path(where("libasan.so")).is_absolute():
        pytest.skip("g++ has no libasan.so")
    changed = {
        "CXX": f"{compiler} -g -fsanitize=address,undefined -fno-sanitize-recover=all",
        "LD_PRELOAD": f"{where('libasan.so')} {where('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",  # Python keeps what it allocates
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("kernels")),
        "OMP_NUM_THREADS": "2",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "faulthandler", *arguments]
        environment = {**os.environ, **changed}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"), [("beyond the end", "heap-buffer-overflow"), ("askew", "misaligned address")]
)
def test_the_build_stops_at_a_kernel_that_was_lied_to(sanitized, fault, told):
    done = sanitized("-c", LIED_TO.format(fault=fault))
    assert done.returncode != 0
    assert told in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_kernels_tests_in_that_build(sanitized):
    done = sanitized("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-x", *KERNELS)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout
