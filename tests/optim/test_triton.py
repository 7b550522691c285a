"""The CUDA kernels without a GPU: their arithmetic in Triton's interpreter, their code compiled.

The interpreter runs in a process of its own, as its switch must be set before triton is imported
and would change every kernel of this one. What only a GPU shows is in test_triton_gpu.py.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="NO TRITON: nothing of the CUDA kernels was tested")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

import halfstep.optim.kernels.triton_kernels as kernels
from halfstep.kernels import softmax_triton
from halfstep.optim.kernels import cuda
from halfstep.precision.masters.rounding import ROUNDING

PROGRAMS = Path(__file__).with_name("triton_programs.py")
QUICK = ("bits-directed", "bits-lion", "host-lion", "extremes", "tiles", "masters", "captures")


def outcomes(names):
    """What went wrong in each program, or None."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("HALFSTEP_KERNEL", None)
    done = subprocess.run(
        [sys.executable, str(PROGRAMS), *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("names", [QUICK, pytest.param((), marks=pytest.mark.slow, id="all")])
def test_in_the_interpreter(names):
    found = outcomes(names)
    assert set(found) >= set(QUICK)
    assert not any(found.values()), found


SCALARS = {
    "seed": "i32",
    "step": "i32",
    "multiplier": "fp32",
    **{f"c{i}": "fp32" for i in range(8)},
}


def compiled(kernel, signature, constants, capability, **options):
    """PTX for a GPU that need not be here."""
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    names = list(signature)
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {
            (names.index(n),): [["tt.divisibility", 16]]
            for n in names
            if signature[n][0] == "*" or n == "stride"
        },
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options or dict(kernels.LAUNCH)).asm["ptx"]


def require_exact(ptx):
    """No contraction, no flushing, no approximation: what same bits need and a GPU would hide."""
    operations = set(re.findall(r"^\s*(?:@!?%\w+ )?([a-z0-9]+(?:\.[\w:]+)+)", ptx, re.MULTILINE))
    assert operations
    inexact = [o for o in operations if re.match(r"fma\.|mad\.\w*\.?f|.*\.(ftz|approx|full)", o)]
    assert not inexact


def require_no_spill(ptx, capability, path):
    """All values of a thread are in registers, of which three blocks of threads find enough."""
    path.write_text(ptx)
    name = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={name}", str(path)]
    done = subprocess.run(
        [*command, "-o", os.devnull], capture_output=True, text=True, check=True, timeout=120
    )
    said = done.stdout + done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert all(int(used) <= 80 for used in re.findall(r"Used (\d+) registers", said)), said


@pytest.fixture(autouse=True)
def own_triton_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("capability", "rule", "gradient", "update", "moments", "vectors"),
    [
        (80, "sgd", "fp16", "kahan", "bf16", {"v2.b32"}),
        (90, "adamw", "fp32", "split24", "8bit", {"v2.b32", "v4.b32"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (80, "adamw", "bf16", "split", "fp32", {"v2.b32", "v4.b32"}),
                (90, "adamw", "fp32", "fp32", "fp32", {"v4.b32"}),
                (90, "lion", "bf16", "stochastic", "8bit", {"v2.b32"}),
                (90, "directed", "bf16", "split", "fp32", {"v2.b32"}),
                (90, "directed", "fp32", "stochastic", "fp32", {"v2.b32", "v4.b32"}),
            )
        ),
    ],
)
def test_the_update_compiles_to_exact_wide_code(
    capability, rule, gradient, update, moments, vectors, tmp_path
):
    pointers = {"owners": "*i32", "table": "*i64", "gradients": "*i64", "decision": "*fp64"}
    constants = {
        "rule": rule,
        "gradient_dtype": gradient,
        "update": update,
        "moments": moments,
        "aligned": True,
        "decided": True,
        "rows": cuda.ROWS,
        "tiles": cuda.TILES,
    }
    ptx = compiled(kernels.update_kernel, {**pointers, **SCALARS}, constants, capability)
    require_exact(ptx)
    require_no_spill(ptx, capability, tmp_path / "update.ptx")
    # 4 elements per thread: 16 bytes of fp32 per load, 8 of 16-bit numbers, 4 of 8-bit ones
    assert set(re.findall(r"ld\.global\.(v\d\.b\d+)", ptx)) == vectors
    if rule == "adamw":
        assert "div.rn.f32" in ptx
        assert "sqrt.rn.f32" in ptx


@pytest.mark.slow
@pytest.mark.parametrize("update", ["fp32", *ROUNDING])
def test_masters_compile_to_wide_code(update, tmp_path):
    signature = {"owners": "*i32", "table": "*i64", "values": "*i64"}
    shared = {"aligned": True, "rows": cuda.ROWS, "tiles": cuda.TILES}
    ptx = compiled(kernels.masters_kernel, signature, {"update": update, **shared}, 90)
    require_no_spill(ptx, 90, tmp_path / "masters.ptx")
    assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_the_loss_head_compiles_to_wide_code(dtype, tmp_path):
    signature = {"logits": f"*{dtype}", "targets": "*i64", "losses": "*fp32", "stride": "i32"}
    signature |= {"ignored": "i32", "unit": "fp32"}
    constants = {"columns": 50257, "write": True, "block": softmax_triton.BLOCK}
    kernel, options = softmax_triton.softmax_errors_kernel, softmax_triton.LAUNCH
    ptx = compiled(kernel, signature, constants, 90, **options)
    require_no_spill(ptx, 90, tmp_path / "head.ptx")
    assert ".f64" not in ptx
    assert ptx.count("ld.global.v4.b32") == ptx.count("st.global.v4.b32") * 2 > 0
