"""Which formats each kind of device multiplies natively, and the policy that ``auto`` takes there.

One table answers for ``auto``, ``support`` and ``halfstep doctor``.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

BF16_INSTRUCTIONS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""The names that Linux gives to CPU instructions for bf16 products (``bf16`` on Arm)."""

_CUDA = "CUDA C++ Programming Guide, Compute Capabilities"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Devices that multiply the same formats, and the policy that suits them."""

    family: str
    type: str  # cuda, rocm or cpu
    native: str  # the formats that matrix products have instructions for
    policy: str  # what auto takes
    reason: str  # why, as the rest of a sentence that begins with the device's name
    source: str
    since: tuple[int, int] = (0, 0)  # for CUDA, the first compute capability of the kind
    # K N / (K + N), of K inputs and N outputs, from which a linear layer gains by 8 bits or less.
    # Source: 6 bytes of each number at 3 TB/s beside the 1250 and 700 TFLOP/s that cuBLAS reaches
    # on an H100, and launches (benchmarks/results/h100-2026-11-27)
    fp8_from: int = 0
    models: str = ""  # a regular expression that finds the names of such GPUs; "" finds every one


_BF16, _FP16 = (
    "has bf16 tensor cores: the range of fp32, so that the loss needs no scale",
    (
        "has tensor cores for fp16 and none for bf16; the loss is scaled, since fp16 flushes "
        "small gradients"
    ),
)
DEVICES: tuple[DeviceKind, ...] = (
    DeviceKind(
        family="Blackwell", type="cuda", since=(10, 0), native="fp32 tf32 bf16 fp16 fp8 fp4",
        policy="bf16-mixed", reason=_BF16, fp8_from=700,
        source=f"{_CUDA}; NVIDIA Blackwell Architecture Technical Brief",
    ),
    DeviceKind(
        family="Ada or Hopper", type="cuda", since=(8, 9), native="fp32 tf32 bf16 fp16 fp8",
        policy="bf16-mixed", reason=_BF16, fp8_from=700,
        source=f"{_CUDA}; NVIDIA Ada GPU Architecture; NVIDIA H100 Tensor Core GPU Architecture",
    ),
    DeviceKind(
        family="Ampere", type="cuda", since=(8, 0), native="fp32 tf32 bf16 fp16",
        policy="bf16-mixed", reason=_BF16,
        source=f"{_CUDA}; NVIDIA A100 Tensor Core GPU Architecture",
    ),
    DeviceKind(
        family="Turing without tensor cores", type="cuda", since=(7, 5), native="fp32",
        models=r"GTX ?16(\d\d)?\b|\bMX[45]50\b|\bT(400|500|600|1000|1200)\b",
        policy="fp32",
        reason="has no tensor cores, and its fp16 convolutions have given NaN",
        source="pytorch/pytorch#58123 and #77955",
    ),
    DeviceKind(
        family="Volta or Turing", type="cuda", since=(7, 0), native="fp32 fp16",
        policy="fp16-mixed", reason=_FP16,
        source=f"{_CUDA}; NVIDIA Tesla V100 and Turing GPU Architecture",
    ),
    DeviceKind(
        family="Pascal and older", type="cuda", native="fp32", policy="fp32",
        reason="has no tensor cores: 16-bit products would save memory, and no time", source=_CUDA,
    ),
    DeviceKind(
        family="AMD Instinct", type="rocm", models=r"\bMI ?[123]\d\d", native="fp32 bf16 fp16",
        policy="bf16-mixed",
        reason="has matrix cores for bf16 (halfstep was never run on one)",
        source="AMD CDNA Architecture white paper",
    ),
    DeviceKind(
        family="another AMD GPU", type="rocm", native="fp32", policy="fp32",
        reason="is not in halfstep's table; name a policy, such as fp16-mixed, to try one",
        source="none: nothing is claimed",
    ),
    DeviceKind(
        family="CPU with bf16 instructions", type="cpu", native="fp32 bf16",
        policy="bf16-mixed", reason="multiplies bf16 in hardware (AVX512-BF16, AMX or Arm BF16)",
        source="Intel Architecture Instruction Set Extensions; Arm Architecture Reference Manual",
    ),
    DeviceKind(
        family="CPU without bf16 instructions", type="cpu", native="fp32",
        policy="fp32",
        reason="has no instructions for bf16: its products would be simulated, with the memory and "
            "the rounding of bf16 and without its speed",
        source="docs/policies.md, measured",
    ),
)  # fmt: skip
"""Every kind of device, the most particular first."""


def choose(device: torch.device) -> DeviceKind:
    """The row of the table for a device, with a whole sentence as its reason; allocates nothing.

    A device that cannot be used at all gets fp32, which :func:`halfstep.support` then refuses with
    the reason, and has no source.
    """
    kind = kind_of(device)
    if kind is None:
        reason = f"torch has no {device.type} device here"
        return DeviceKind(
            family="none", type=device.type, native="", policy="fp32", reason=reason, source=""
        )
    return replace(kind, reason=f"{name_of(device)} ({kind.family}) {kind.reason}")


def kind_of(device: torch.device) -> DeviceKind | None:
    """The row of the table for a device of this machine; None if there is no such device."""
    name, has, of = "", (0, 0), device.type
    if of == "cuda" and torch.cuda.is_available():
        name = name_of(device).upper()
        of = "rocm" if torch.version.hip else "cuda"
        has = torch.cuda.get_device_capability(device)
    elif of == "cuda":
        return None
    rows = [kind for kind in DEVICES if kind.type == of and kind.since <= has]
    if of == "cpu" and not cpu_has_bf16():
        return rows[-1]
    return next((kind for kind in rows if re.search(kind.models, name)), None)


def first_capability(form: str) -> tuple[int, int]:
    """The first compute capability with tensor cores for a format; (0, 0) for fp32."""
    return min(k.since for k in DEVICES if k.type == "cuda" and form in k.native.split())


def name_of(device: torch.device) -> str:
    """The name of a device of this machine: the GPU's, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()


def default_device(index: int = 0) -> torch.device:
    """The device that ``auto`` means: CUDA where there is one, or else the CPU."""
    return torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")


@cache
def _cpuinfo() -> list[tuple[str, str]]:
    """What Linux says of this CPU, as keys and values; nothing on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = (line.partition(":") for line in text.splitlines())
    return [(key.strip(), value.strip()) for key, _, value in lines]


@cache
def cpu_instructions() -> frozenset[str]:
    """The instruction sets of this CPU, as Linux names them; none on other systems."""
    flags = {words for key, words in _cpuinfo() if key in ("flags", "Features")}
    return frozenset(word for words in flags for word in words.split())


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512-BF16, AMX or Arm BF16)."""
    return bool(cpu_instructions() & BF16_INSTRUCTIONS)


def cpu_name() -> str:
    """The processor's name, as ``AMD EPYC 9654``."""
    names = (value for key, value in _cpuinfo() if key == "model name")
    return next(names, platform.processor() or platform.machine())
