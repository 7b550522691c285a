"""Whether a device can honour a policy, and the context under which the forward runs.

``torch.autocast`` warns and disables itself for a combination it does not support; here such a
combination is refused before anything runs, with the nearest policy that works.
"""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from halfstep.errors import PrecisionError
from halfstep.precision.policy import PrecisionPolicy, dtype_name
from halfstep.precision.simulate import SimulatedProducts

Status = Literal["native", "simulated", "refused"]


@dataclass(frozen=True, slots=True)
class Support:
    """How a device runs a policy.

    Attributes:
        status: ``"native"``: by instructions of the device. ``"simulated"``: halfstep runs
            16-bit products through fp32 kernels with 16-bit rounding: the results and the memory
            of the format, not its speed. ``"refused"``: not run.
        reason: One sentence for the user.
        nearest: For ``"refused"``, the policy to ask for instead.
    """

    status: Status
    reason: str
    nearest: str = ""


def support(policy: PrecisionPolicy, device: torch.device) -> Support:
    """Tell how ``device`` runs ``policy``; needs no GPU memory and changes nothing.

    **Source:** compute capability 7.0 (Volta) brought fp16 tensor cores, 8.0 (Ampere) bf16 and
    tf32: CUDA C++ Programming Guide, section "Compute Capabilities".
    """
    compute = policy.compute_dtype
    if device.type == "cpu":
        if policy.tf32:
            return Support("refused", "a CPU has no tf32 matrix instructions", "fp32")
        name = dtype_name(compute)
        if _is_simulated(policy, device):
            how = f"{name} products run through fp32 kernels with {name} rounding"
            return Support("simulated", how)
        return Support("native", f"{name} matrix kernels of this CPU")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return Support("refused", "torch sees no CUDA device", _nearest_on_cpu(policy))
        major, minor = torch.cuda.get_device_capability(device)
        needed = 8 if policy.tf32 or compute == torch.bfloat16 else 7
        what = "tf32" if policy.tf32 else dtype_name(compute)
        if what != "fp32" and major < needed:
            nearest = "fp16-mixed" if what == "bf16" and major >= 7 else "fp32"
            return Support(
                "refused",
                f"compute capability {major}.{minor} has no {what} tensor cores ({needed}.0 has)",
                nearest,
            )
        return Support("native", f"{what} on compute capability {major}.{minor}")
    reason = f"device {device.type!r} is not supported yet"
    return Support("refused", reason, _nearest_on_cpu(policy))


def _nearest_on_cpu(policy: PrecisionPolicy) -> str:
    return f"{'fp32' if policy.tf32 else policy} on --device cpu"


def require_support(policy: PrecisionPolicy, device: torch.device) -> Support:
    """Return how the device runs the policy, or refuse.

    Raises:
        PrecisionError: If it cannot be honoured, naming policy, device, reason and nearest policy.
    """
    found = support(policy, device)
    if found.status == "refused":
        raise PrecisionError(
            f"precision {policy} cannot be honoured on {device}: {found.reason}; the nearest that "
            f"can is {found.nearest}"
        )
    return found


@cache
def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512-BF16, AMX or Arm BF16)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        if platform.system() != "Darwin":
            return False
        query = ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        return answer.stdout.strip() == "1"
    words = set(text.split())
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def _is_simulated(policy: PrecisionPolicy, device: torch.device) -> bool:
    """Whether the products of a policy run through fp32 kernels (fp16 on every CPU)."""
    compute = policy.compute_dtype
    missing = compute == torch.float16 or (compute == torch.bfloat16 and not cpu_has_bf16())
    return device.type == "cpu" and missing


@contextlib.contextmanager
def float32_matmul(tf32: bool, device: torch.device) -> Iterator[None]:
    """Pin how fp32 products round their operands, whatever the process has set globally.

    torch lets fp32 products round to tf32 or bf16 by global switches (and cuDNN convolutions use
    tf32 by default), so that "fp32" alone does not say what runs. Restored on exit.
    """
    backends: list[Any]  # torch's stubs do not know all of them
    if device.type == "cuda":
        cudnn: Any = torch.backends.cudnn
        backends = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    else:
        mkldnn: Any = torch.backends.mkldnn
        backends = [mkldnn.matmul, mkldnn.conv, mkldnn.rnn]
    wanted = "tf32" if tf32 else "ieee"
    before = [_own_setting(backend) for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = wanted
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def _own_setting(backend: Any) -> str:
    """What a backend was set to itself: ``"none"`` where it follows the setting above it.

    The setting is cleared on the way: there is no other way to see what lies above it.
    """
    found: str = backend.fp32_precision
    backend.fp32_precision = "none"
    return "none" if found == backend.fp32_precision else found


@contextlib.contextmanager
def arithmetic(policy: PrecisionPolicy, device: torch.device) -> Iterator[None]:
    """The context that both forward and backward need, whatever is on around them.

    fp32 products are pinned, formats that a CPU has no instructions for are simulated, and an outer
    ``torch.autocast``, which would change the precision that was asked for, is off.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(float32_matmul(policy.tf32, device))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if _is_simulated(policy, device):
            stack.enter_context(SimulatedProducts(policy.compute_dtype))
        yield


@contextlib.contextmanager
def autocast(policy: PrecisionPolicy, device: torch.device) -> Iterator[None]:
    """The context for the forward: :func:`arithmetic`, and operation-wise casts for ``*-mixed``.

    Raises:
        PrecisionError: If the device cannot honour the policy. torch.autocast would warn and run
            in another precision.
    """
    require_support(policy, device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(arithmetic(policy, device))
        if policy.casts_per_op:
            stack.enter_context(torch.autocast(device.type, dtype=policy.compute_dtype))
        yield
