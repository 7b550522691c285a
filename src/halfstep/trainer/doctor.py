"""Says which precision a device is good for: what it multiplies natively, how fast, what to take.

The device at hand is measured at the user's own shapes; one that is only named is looked up.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from halfstep.errors import ConfigError
from halfstep.precision.casting.autocast import support
from halfstep.precision.explain import bytes_per_parameter
from halfstep.precision.policy.devices import (
    DeviceKind,
    Status,
    choose,
    cpu_instructions,
    kind_named,
    name_of,
    reason_of,
)
from halfstep.precision.policy.policy import DTYPES, POLICIES
from halfstep.precision.policy.probe import failed_probe
from halfstep.precision.policy.spelling import parse_policy
from halfstep.trainer.config.run import BaseConfig
from halfstep.trainer.config.tasks import TrainConfig
from halfstep.trainer.environment import choose_device, gemm_table

FORMS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
_INSTRUCTIONS = ("amx_bf16", "amx_fp16", "amx_int8", "avx512_bf16", "avx512_fp16", "avx512f",
                 "avx2", "bf16", "asimdhp", "i8mm", "sve")  # fmt: skip
Product = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class FormRow:
    """One number format on a device.

    Attributes:
        form: Its name, such as ``"bf16"``.
        status: Whether the device has instructions for its products.
        here: How halfstep runs it: ``native``, ``simulated``, ``refused``, or ``probed`` for the
            GPU of a Mac that is only named; empty without a policy for it.
        probe: What a probe against fp64 found wrong; empty if nothing, or if it was not probed.
        rates: Measured FLOP/s, by product.
    """

    form: str
    status: Status
    here: str = ""
    probe: str = ""
    rates: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What :func:`diagnose` and :func:`diagnose_named` found.

    Attributes:
        device: ``cpu``, ``cuda:0``, or the name that was asked for.
        name: The product's name.
        family: The row of the table.
        policy: What to take.
        reason: Why.
        source: Where the table has it from.
        measured: Whether this device was measured, or only looked up.
        forms: A row for each format.
        smallest: The policy that holds the fewest bytes there without losing updates.
        bytes_per_parameter: With AdamW, by policy: fp32's, the policy's and the smallest's.
        product_times: Measured time of the products in the policy's format, in fp32's times; None
            where it was not measured, or where the policy is fp32.
        instructions: Of a CPU, those that matter here.
        notes: What else to know.
    """

    device: str
    name: str
    family: str
    policy: str
    reason: str
    source: str
    measured: bool
    forms: tuple[FormRow, ...]
    smallest: str
    bytes_per_parameter: dict[str, float]
    product_times: float | None = None
    instructions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As values for JSON."""
        return asdict(self)


def diagnose(device: torch.device, products: tuple[Product, ...] = ()) -> Diagnosis:
    """Look at a device of this machine, and measure its products for about a second.

    Args:
        device: The device.
        products: m, k and n of the products to measure; none: one square product.

    Raises:
        ConfigError: If there is no such device.
    """
    chosen = choose(device)
    if chosen.kind is None:
        raise ConfigError(f"{chosen.reason}; halfstep doctor --device cpu, or a product's name")
    rates: dict[str, dict[str, float]] = {}
    here: dict[str, str] = {}
    for product in products or (None,):
        key = "square" if product is None else "x".join(map(str, product))
        for row in gemm_table(device, product):
            here[row["format"]] = row["status"]
            if "gemm_flops_per_second" in row:
                rates.setdefault(row["format"], {})[key] = row["gemm_flops_per_second"]
    forms = tuple(
        FormRow(form, chosen.kind.status(form), here.get(form, ""),
                _probed(device, form, here.get(form, "")), rates.get(form, {}))
        for form in FORMS
    )  # fmt: skip
    times = _times(rates, chosen.policy.partition("-")[0], products)
    is_cpu = device.type == "cpu"
    known = cpu_instructions() if is_cpu else frozenset()
    return Diagnosis(
        str(device), name_of(device), chosen.kind.family, chosen.policy, chosen.reason,
        chosen.kind.source, True, forms, *_bytes(chosen.kind), times,
        tuple(word for word in _INSTRUCTIONS if word in known),
        tuple(_notes(device, chosen.policy, forms, times)),
    )  # fmt: skip


def diagnose_named(name: str) -> Diagnosis:
    """Look a device up by its product's name, such as ``"T4"``; nothing is measured.

    Raises:
        PrecisionError: If the table has no such device.
    """
    kind: DeviceKind = kind_named(name)
    forms = tuple(FormRow(form, kind.status(form), _expected(kind, form)) for form in FORMS)
    return Diagnosis(
        name, name, kind.family, kind.policy, reason_of(kind, name), kind.source, False, forms,
        *_bytes(kind),
        notes=("nothing was measured: this is what halfstep's table says of such a device",),
    )  # fmt: skip


def is_live(name: str) -> bool:
    """Whether ``--device`` names a device of this machine, and no product.

    ``mps`` is a product's name too: where there is no Mac, the question is what one would do.
    """
    live = ("auto", "cpu", "cuda", *(["mps"] if torch.backends.mps.is_available() else []))
    return name.partition(":")[0] in live


def products_of(config: BaseConfig) -> tuple[Product, ...]:
    """The products of one micro-batch of a GPT: of attention, and both of the MLP.

    Raises:
        ConfigError: For a task whose model is not described by its configuration alone.
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"--config {config.name} is of the task {config.TASK}, whose shapes are the model's; "
            "give --shapes MxKxN"
        )
    width = config.model.n_embd
    tokens = max(1, config.run.batch_size // config.run.grad_accum) * config.block_size
    return ((tokens, width, 3 * width), (tokens, width, 4 * width), (tokens, 4 * width, width))


def read_product(text: str) -> Product:
    """Read ``2048x384x1536``.

    Raises:
        ConfigError: If it is not three positive numbers.
    """
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--shapes {text!r}; allowed: MxKxN of a product of (M, K) and (K, N), such as "
            "2048x384x1536"
        )
    m, k, n = map(int, parts)
    if max(m * k, k * n, m * n) > 2**28:
        raise ConfigError(f"--shapes {text}: a matrix of over 2^28 elements is too large to try")
    return m, k, n


def live_device(name: str) -> torch.device:
    """The device of this machine that ``--device`` names."""
    return choose_device(name)


def _probed(device: torch.device, form: str, here: str) -> str:
    """What a probe found wrong with a format that runs natively."""
    return failed_probe(device, DTYPES[form]) if form in DTYPES and here == "native" else ""


def _expected(kind: DeviceKind, form: str) -> str:
    """How halfstep would run a format on a device that is not here; a Mac's are probed there."""
    if form not in ("tf32", *DTYPES):
        return ""
    if kind.type == "mps":
        return "probed" if form in DTYPES else "refused"
    status = kind.status(form)
    simulated = status == "emulated" and kind.type == "cpu"
    return "native" if status == "native" else "simulated" if simulated else "refused"


def _bytes(kind: DeviceKind) -> tuple[str, dict[str, float]]:
    """The smallest policy of a device, and the bytes per parameter of three policies."""
    smallest = "bf16-split" if "bf16" in kind.native else kind.policy
    smallest += ",moments=8bit"
    names = dict.fromkeys(("fp32", kind.policy, smallest))
    return smallest, {n: sum(bytes_per_parameter(parse_policy(n)).values()) for n in names}


def _times(
    rates: dict[str, dict[str, float]], form: str, products: tuple[Product, ...]
) -> float | None:
    """Time of all products in a format, in fp32's times."""
    if form == "fp32" or form not in rates:
        return None
    work = {"x".join(map(str, p)): 2.0 * p[0] * p[1] * p[2] for p in products} or {"square": 1.0}

    def seconds(name: str) -> float:
        return sum(flops / rates[name][key] for key, flops in work.items())

    return seconds(form) / seconds("fp32")


def _notes(
    device: torch.device, policy: str, forms: tuple[FormRow, ...], times: float | None
) -> list[str]:
    notes: list[str] = [
        f"{row.form}: a probe found it wrong here ({row.probe})" for row in forms if row.probe
    ]
    if times is not None and times > 1:
        notes.append(
            f"products in {policy.partition('-')[0]} took {times:.2f} times as long as in fp32 at "
            "these shapes: halfstep bench compares whole steps, and fp32 may be the faster policy"
        )
    if device.type == "cuda" and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability(device)
        built = torch.cuda.get_arch_list()
        if built and not any(arch.endswith(f"_{major}{minor}") for arch in built) and (
            f"sm_{major}0" not in built
        ):  # fmt: skip
            notes.append(
                f"this torch has no kernels for compute capability {major}.{minor} (it has "
                f"{', '.join(built)}): install a build of torch that has"
            )
    if device.type == "mps":
        notes.append("halfstep was never run on a Mac's GPU; the probes above are all it knows")
    found = support(POLICIES[policy], device)
    if found.status != "native":
        status = found.status
        notes.append(f"{policy} is {status} here: {found.reason}")
    return notes
