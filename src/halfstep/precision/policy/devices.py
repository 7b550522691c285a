"""Which formats each kind of device multiplies natively, and the policy that ``auto`` takes there.

One table answers for the device at hand (``auto``, ``support``, ``halfstep doctor``) and for one
that is only named (``halfstep doctor --device T4``).
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from halfstep.errors import PrecisionError

BF16_INSTRUCTIONS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""The names that Linux gives to CPU instructions for bf16 products (``bf16`` on Arm)."""

_CUDA = "CUDA C++ Programming Guide, Compute Capabilities"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Devices that multiply the same formats, and the policy that suits them."""

    family: str
    type: str  # cuda, rocm, mps or cpu
    models: str  # a regular expression that finds the names of such devices
    examples: tuple[str, ...]  # some of those names, as people write them
    native: frozenset[str]  # the formats that matrix products have instructions for
    policy: str  # what auto takes
    reason: str  # why, as the rest of a sentence that begins with the device's name
    source: str
    since: tuple[int, int] = (0, 0)  # for CUDA, the first compute capability of the kind
    flags: frozenset[str] = frozenset()  # for a CPU, instructions of which one makes it of the kind
    by_name: bool = False  # whether a CUDA device is of the kind by its name alone


def _forms(names: str) -> frozenset[str]:
    return frozenset(names.split())


_BF16, _FP16 = (
    "has bf16 tensor cores: the range of fp32, so that the loss needs no scale",
    (
        "has tensor cores for fp16 and none for bf16; the loss is scaled, since fp16 flushes "
        "small gradients"
    ),
)
# Names that contain others stand first: "RTX 6000 Ada" before "RTX A6000", "GTX 1650" before "T4".
# A GeForce ends in 50 to 90; workstation cards share one number: Quadro RTX 5000, RTX 5000 Ada.
DEVICES: tuple[DeviceKind, ...] = (
    DeviceKind(
        family="Blackwell (GeForce and workstation)", type="cuda", since=(12, 0),
        models=r"RTX ?50([5-9]0)?(TI)?\b|BLACKWELL|GB10\b|DGX SPARK",
        examples=("RTX 5090", "RTX PRO 6000 Blackwell", "GB10"),
        native=_forms("fp32 tf32 bf16 fp16 fp8 fp4"), policy="bf16-mixed", reason=_BF16,
        source=f"{_CUDA}; NVIDIA RTX Blackwell GPU Architecture",
    ),
    DeviceKind(
        family="Blackwell", type="cuda", since=(10, 0),
        models=r"G?B[123]00\b", examples=("B200", "GB200", "B300"),
        native=_forms("fp32 tf32 bf16 fp16 fp8 fp4"), policy="bf16-mixed", reason=_BF16,
        source=f"{_CUDA}; NVIDIA Blackwell Architecture Technical Brief",
    ),
    DeviceKind(
        family="Hopper", type="cuda", since=(9, 0),
        models=r"G?H[128]00\b|H20\b", examples=("H100", "H200", "GH200"),
        native=_forms("fp32 tf32 bf16 fp16 fp8"), policy="bf16-mixed", reason=_BF16,
        source=f"{_CUDA}; NVIDIA H100 Tensor Core GPU Architecture",
    ),
    DeviceKind(
        family="Ada", type="cuda", since=(8, 9),
        models=r"\bL(4|20|40S?)\b|RTX ?40([5-9]0)?(TI)?\b|\bADA\b",
        examples=("L4", "L40S", "RTX 4090", "RTX 6000 Ada"),
        native=_forms("fp32 tf32 bf16 fp16 fp8"), policy="bf16-mixed", reason=_BF16,
        source=f"{_CUDA}; NVIDIA Ada GPU Architecture",
    ),
    DeviceKind(
        family="Ampere", type="cuda", since=(8, 0),
        models=r"\bA(2|10G?|16|30|40|100|800)\b|RTX ?30([5-9]0)?(TI)?\b|RTX ?A\d000\b|\bORIN\b",
        examples=("A100", "A10G", "A40", "RTX 3090", "RTX A6000"),
        native=_forms("fp32 tf32 bf16 fp16"), policy="bf16-mixed", reason=_BF16,
        source=f"{_CUDA}; NVIDIA A100 Tensor Core GPU Architecture",
    ),
    DeviceKind(
        family="Turing without tensor cores", type="cuda", since=(7, 5), by_name=True,
        models=r"GTX ?16(\d\d)?\b|\bMX[45]50\b|\bT(400|500|600|1000|1200)\b",
        examples=("GTX 1650", "GTX 1660 Ti"),
        native=_forms("fp32"), policy="fp32",
        reason="has no tensor cores, and its fp16 convolutions have given NaN",
        source="pytorch/pytorch#58123 and #77955",
    ),
    DeviceKind(
        family="Turing", type="cuda", since=(7, 5),
        models=r"\bT4G?\b|RTX ?20([5-9]0)?(TI)?\b|QUADRO RTX|TITAN RTX",
        examples=("T4", "RTX 2080 Ti", "Quadro RTX 6000"),
        native=_forms("fp32 fp16"), policy="fp16-mixed",
        reason=_FP16,
        source=f"{_CUDA}; NVIDIA Turing GPU Architecture",
    ),
    DeviceKind(
        family="Volta", type="cuda", since=(7, 0),
        models=r"\bG?V100\b|TITAN V\b|XAVIER", examples=("V100", "Titan V"),
        native=_forms("fp32 fp16"), policy="fp16-mixed",
        reason=_FP16,
        source=f"{_CUDA}; NVIDIA Tesla V100 GPU Architecture",
    ),
    DeviceKind(
        family="Pascal and older", type="cuda",
        models=r"\bP(4|40|100)\b|\b[KM](40|60|80)\b|GTX ?(9|10)\d\d|TITAN X",
        examples=("P100", "GTX 1080", "K80"),
        native=_forms("fp32"), policy="fp32",
        reason="has no tensor cores: 16-bit products would save memory, and no time",
        source=_CUDA,
    ),
    DeviceKind(
        family="AMD Instinct", type="rocm",
        models=r"\bMI ?[123]\d\d", examples=("MI250", "MI300X"),
        native=_forms("fp32 bf16 fp16"), policy="bf16-mixed",
        reason="has matrix cores for bf16 (halfstep was never run on one)",
        source="AMD CDNA Architecture white paper",
    ),
    DeviceKind(
        family="another AMD GPU", type="rocm",
        models=r"RADEON|\bRX ?\d{4}", examples=("RX 7900",),
        native=_forms("fp32"), policy="fp32",
        reason="is not in halfstep's table; name a policy, such as fp16-mixed, to try one",
        source="none: nothing is claimed",
    ),
    DeviceKind(
        family="Apple M", type="mps",
        models=r"\bM[1-9]( (PRO|MAX|ULTRA))?$|APPLE M\d|\bMPS\b|MAC", examples=("M1", "M3 Max"),
        native=_forms("fp32"), policy="fp32",
        reason="computes in fp32 (halfstep was never run on one)",
        source="none: nothing is claimed",
    ),
    DeviceKind(
        family="CPU with AMX", type="cpu", flags=frozenset({"amx_bf16"}),
        models=r"AMX|(SAPPHIRE|EMERALD|GRANITE) RAPIDS", examples=("Sapphire Rapids", "AMX"),
        native=_forms("fp32 bf16"), policy="bf16-mixed",
        reason="multiplies bf16 in matrix tiles",
        source="Intel 64 and IA-32 Architectures Software Developer's Manual, AMX",
    ),
    DeviceKind(
        family="CPU with AVX512-BF16", type="cpu", flags=frozenset({"avx512_bf16"}),
        models=r"AVX512.?BF16|COOPER LAKE|ZEN ?[45]|EPYC 9\d{3}|RYZEN \d 7\d{3}|RYZEN \d 9\d{3}",
        examples=("Zen 4", "EPYC 9654", "Cooper Lake"),
        native=_forms("fp32 bf16"), policy="bf16-mixed",
        reason="has dot products of bf16 pairs (vdpbf16ps)",
        source="Intel Architecture Instruction Set Extensions, AVX512_BF16",
    ),
    DeviceKind(
        family="Arm CPU with BF16", type="cpu", flags=frozenset({"bf16"}),
        models=r"GRAVITON ?[3-9]|NEOVERSE V|\bGRACE\b|ARM.*BF16",
        examples=("Graviton3", "Grace"),
        native=_forms("fp32 bf16"), policy="bf16-mixed",
        reason="has matrix instructions for bf16 (BFMMLA)",
        source="Arm Architecture Reference Manual, FEAT_BF16",
    ),
    DeviceKind(
        family="CPU without bf16 instructions", type="cpu",
        models=r"\bCPU\b|AVX2|AVX512|(ICE|SKY|CASCADE|ALDER|RAPTOR) ?LAKE|ZEN ?[123]|GRAVITON ?2",
        examples=("Skylake", "Zen 3", "AVX2"),
        native=_forms("fp32"), policy="fp32",
        reason="has no instructions for bf16: its products would be simulated, with the memory and "
            "the rounding of bf16 and without its speed",
        source="docs/policies.md, measured",
    ),
)  # fmt: skip
"""Every kind of device, the most particular first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What ``auto`` takes on a device."""

    policy: str
    reason: str  # a sentence for the user
    kind: DeviceKind | None = None


def choose(device: torch.device) -> Choice:
    """The policy that ``auto`` takes on a device; allocates nothing.

    A device that cannot be used at all gets fp32, which :func:`halfstep.support` then refuses with
    the reason.
    """
    kind = kind_of(device)
    if kind is None:
        return Choice("fp32", f"torch has no {device.type} device here")
    name = name_of(device)
    return Choice(kind.policy, reason_of(kind, name), kind)


def reason_of(kind: DeviceKind, name: str) -> str:
    """Why a device takes its kind's policy, as a sentence with the device's name."""
    return f"{name} ({kind.family}) {kind.reason}"


def kind_of(device: torch.device) -> DeviceKind | None:
    """The row of the table for a device of this machine; None if there is no such device."""
    if device.type == "cpu":
        flags = cpu_instructions()
        rows = [kind for kind in DEVICES if kind.type == "cpu"]
        return next((kind for kind in rows if kind.flags & flags), rows[-1])
    if device.type == "mps":
        found = torch.backends.mps.is_available()
        return next(kind for kind in DEVICES if kind.type == "mps") if found else None
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = name_of(device).upper()
    if torch.version.hip:
        rows = [kind for kind in DEVICES if kind.type == "rocm"]
        return next((kind for kind in rows if re.search(kind.models, name)), rows[-1])
    has = torch.cuda.get_device_capability(device)
    rows = [kind for kind in DEVICES if kind.type == "cuda" and kind.since <= has]
    return next(kind for kind in rows if not kind.by_name or re.search(kind.models, name))


def kind_named(name: str) -> DeviceKind:
    """The row of the table for a device by its product name, such as ``"T4"`` or ``"RTX 3090"``."""
    text = " ".join(name.upper().replace("-", " ").split())
    for kind in DEVICES:
        if text and (re.search(kind.models, text) or text == kind.family.upper()):
            return kind
    known = ", ".join(kind.examples[0] for kind in DEVICES)
    number = re.fullmatch(r"\d{4}( .*)?", text) and f"RTX {text}"
    close = number and any(re.search(kind.models, number) for kind in DEVICES)
    hint = f", did you mean {number!r}?" if close else ""
    raise PrecisionError(
        f"device {name[:40]!r} is not in halfstep's table of devices{hint}; it has names such as "
        f"{known}; halfstep doctor without --device looks at this machine, such as a laptop"
    )


def first_capability(form: str) -> tuple[int, int]:
    """The first compute capability with tensor cores for a format; (0, 0) for fp32."""
    return min(k.since for k in DEVICES if k.type == "cuda" and form in k.native and not k.by_name)


def name_of(device: torch.device) -> str:
    """The name of a device of this machine: the GPU's, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()


def default_device(index: int = 0) -> torch.device:
    """The device that ``auto`` means: CUDA where there is one, a Mac's GPU, or else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", index)
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


@cache
def cpu_instructions() -> frozenset[str]:
    """The instruction sets of this CPU, as Linux names them; none on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    lines = [line.partition(":") for line in text.splitlines()]
    return frozenset(
        word for key, _, words in lines if key.strip() in ("flags", "Features")
        for word in words.split()
    )  # fmt: skip


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512-BF16, AMX or Arm BF16)."""
    return bool(cpu_instructions() & BF16_INSTRUCTIONS)


def cpu_name() -> str:
    """The processor's name, as ``AMD EPYC 9654``."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
