"""The commands ``explain``, ``formats``, ``doctor``, ``estimate`` and ``report``."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path

import torch

from halfstep.cli.commands import Doctor, Estimate, Explain, Formats, Report
from halfstep.diagnostics.memory import parts_table, size_text
from halfstep.distributed.layout import Layout
from halfstep.errors import ConfigError
from halfstep.formats import BLOCK_FORMATS, FORMATS, FloatFormat, block_format
from halfstep.precision.casting.autocast import support
from halfstep.precision.explain import bytes_per_parameter, explain
from halfstep.precision.policy.devices import choose, fp8_gain
from halfstep.precision.policy.policy import POLICIES, RECIPES
from halfstep.precision.policy.spelling import parse_policy
from halfstep.report.page import make_report
from halfstep.report.record import read_run
from halfstep.shown import aligned
from halfstep.trainer.environment import choose_device, environment, memory_bytes
from halfstep.trainer.estimate import estimate_count, read_count

_POLICIES = (
    "fp32", "fp16-mixed", "bf16-mixed", "bf16-master", "bf16-split", "bf16-split,moments=8bit"
)  # fmt: skip


def run(arguments: Explain | Formats | Doctor | Estimate | Report) -> int:
    """Run one of these commands."""
    match arguments:
        case Explain():
            _explain(arguments)
        case Formats():
            _formats(arguments)
        case Doctor():
            _doctor(arguments)
        case Estimate():
            _estimate(arguments)
        case Report():
            _report(arguments)
    return 0


def _explain(arguments: Explain) -> None:
    device = choose_device(arguments.device)
    if arguments.policies:
        print("\n\n".join(str(explain(text, device)) for text in arguments.policies))
        return
    rows = [("policy", "bytes/param with AdamW", "scale", f"on {device}")]
    for name, policy in {**POLICIES, **RECIPES}.items():
        size = f"{sum(bytes_per_parameter(policy).values()):g}"
        found = support(policy, device)
        rows.append((name, size, policy.loss_scale.kind, f"{found.status}: {found.reason}"))
    taken = choose(device)
    print(f"{aligned(rows, {1})}\n\nauto is {taken.policy} here: {taken.reason}.")


# --- formats --------------------------------------------------------------------------------------


def _formats(arguments: Formats) -> None:
    """Print every format's range and precision, or what formats make of numbers."""
    values = [_value(text) for text in arguments.values]
    if arguments.block and values:
        print(block_format(arguments.block).explain(values))
    elif arguments.block or len(values) > 1:
        raise ConfigError("give one VALUE, or with --block several: formats 0.1 -3 --block nvfp4")
    elif values:
        print(_roundings(arguments.values[0], values[0]))
    else:
        print(f"{_ranges()}\n\n{_blocks()}")


def _value(text: str) -> float:
    try:
        return float.fromhex(text) if "0x" in text.lower() else float(text)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"VALUE {text!r} is not a number; allowed: decimal (0.1, -1e-8), hexadecimal "
            "(0x1.8p-3), inf, nan"
        ) from None


def _verdict(form: FloatFormat, value: float, number: float) -> str:
    if math.isnan(number):
        exact = "exact" if form.has_nan else "has no NaN"
        return exact if math.isnan(value) else "overflows to NaN"
    if not form.has_nan and abs(value) > form.max:
        return "saturates"
    if math.isinf(number):
        return "exact" if math.isinf(value) else "overflows to inf"
    if number == 0.0 and value != 0.0:
        return "underflows to 0"
    word = "exact" if number == value else "rounded"
    return f"{word}, subnormal" if 0.0 < abs(number) < form.min_normal else word


def _roundings(text: str, value: float) -> str:
    exact = f"{Decimal(value):.60g}" if math.isfinite(value) else str(value)
    rows = [("format", "number", "error", "s|exponent|mantissa", "verdict")]
    for form in FORMATS.values():
        number = float(form.round_to(torch.tensor(value, dtype=torch.float64)))
        error = 0.0 if number == value or math.isnan(value) else abs(number - value)
        bits = "-|-|-"
        if form.has_nan or not math.isnan(number):
            widths = (1, form.exponent_bits, form.mantissa_bits)
            fields = zip(form.bits_of(number), widths, strict=True)
            bits = "|".join(f"{field:0{width}b}" for field, width in fields)
        verdict = _verdict(form, value, number)
        rows.append((form.name, repr(number), f"{error:.3g}", bits, verdict))
    return (
        f"{text} is read as fp64: {exact} = {value.hex()}\nEach format rounds that once, to the "
        f"nearest, ties to even.\n\n{aligned(rows, {1, 2})}"
    )


def _power(value: float) -> str:
    return f"2^{math.frexp(value)[1] - 1}"


def _ranges() -> str:
    rows = [("format", "bits", "s/e/m", "largest", "smallest normal", "smallest positive",
             "gap at 1")]  # fmt: skip
    for form in FORMATS.values():
        layout = f"1/{form.exponent_bits}/{form.mantissa_bits}"
        normal = f"{form.min_normal:.3g} = {_power(form.min_normal)}"
        positive = f"{form.min_subnormal:.3g} = {_power(form.min_subnormal)}"
        most, gap = f"{form.max:.6g}", _power(form.eps)
        rows.append((form.name, str(form.bits), layout, most, normal, positive, gap))
    return (
        f"{aligned(rows, range(1, 7))}\n\ns/e/m: bits of sign, exponent, mantissa. tf32 is stored "
        "in 32 bits. e4m3fn has no infinity: beyond\nthe largest comes NaN. e2m1 has neither: "
        "beyond the largest comes the largest.\nhalfstep formats VALUE shows what each makes of a "
        "number."
    )


def _blocks() -> str:
    rows = [("block format", "numbers", "block", "scales", "rule", "bits per number")]
    for form in BLOCK_FORMATS.values():
        shape = "the tensor" if form.block is None else "x".join(map(str, form.block))
        each = form.element.bits + (form.scale.bits / math.prod(form.block) if form.block else 0)
        scale = f"{form.scale.name}{', and one fp32' * (form.rule == 'two-level')}"
        rows.append((form.name, form.element.name, shape, scale, form.rule, f"{each:.4g}"))
    return (
        f"{aligned(rows, {5})}\n\nhalfstep formats VALUE VALUE ... --block NAME shows what becomes "
        "of a block."
    )


# --- doctor ---------------------------------------------------------------------------------------


def _doctor(arguments: Doctor) -> None:
    device = choose_device(arguments.device)
    chosen = choose(device)
    if chosen.kind is None:
        raise ConfigError(f"{chosen.reason}; halfstep doctor --device cpu")
    found = {"policy": chosen.policy, "reason": chosen.reason, "source": chosen.kind.source}
    if least := chosen.kind.fp8_from:
        shapes = ((768, 3072), (2048, 5632), (4096, 4096))
        gains = (f"{fp8_gain(*shape, least):.2f} at {shape[0]} x {shape[1]}" for shape in shapes)
        found["fp8"] = f"{', '.join(gains)} of bf16's speed predicted; below 1, bf16 is kept"
    if arguments.json:
        print(json.dumps({**found, "environment": environment(device)}, indent=1))
    else:
        print(f"take {found.pop('policy')}: {found.pop('reason')}")
        print("\n".join(f"{key}: {text}" for key, text in found.items()))


# --- estimate, report -----------------------------------------------------------------------------


def _estimate(arguments: Estimate) -> None:
    layout = Layout.parse(arguments.parallel)
    device = choose_device("auto")
    policies = [parse_policy(text, device) for text in arguments.precision or _POLICIES]
    have = read_count(arguments.memory, "--memory") if arguments.memory else memory_bytes(device)
    count = read_count(arguments.params, "--params")
    lora = read_count(arguments.lora, "--lora") if arguments.lora else 0
    found = estimate_count(count, policies, layout, arguments.optimizer, lora)
    if arguments.json:
        tables = [memory.to_json() for memory in found]
        print(json.dumps({"memory_bytes": have, "policies": tables}, indent=1))
        return
    fits = ("fits", ["yes" if memory.total <= have else "no" for memory in found])
    rooms = [have - memory.total for memory in found]
    left = ("left", [size_text(abs(r)) + (" short" if r < 0 else "") for r in rooms])
    ranks = f"; on each of {layout.size} ranks ({layout})" if layout.size > 1 else ""
    print(parts_table(found, fits, left))
    print(f"\nfits: state only, in {size_text(have)}; what is left is for activations{ranks}.")
    print("Temporary tensors, the allocator's rounding and the process come on top.")


def _report(arguments: Report) -> None:
    if not arguments.runs:
        raise ConfigError("halfstep report RUN [RUN ...]: give the folder of a run, or of several")
    folders = [Path(name) for name in arguments.runs]
    report = make_report([read_run(folder) for folder in folders], arguments.lang)
    default = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    path = report.write(Path(arguments.out) if arguments.out else default)
    for row in report.rows:
        print(f"{row.record.name}: {row.verdict}")
    if len(report.rows) > 1:
        heads = [*dict.fromkeys(head for row in report.rows for head in row.card)]
        rows = [[row.card.get(head, "-") for head in heads] for row in report.rows]
        print("", aligned([heads, *rows]), "", sep="\n")
    print(f"Written: {path}")
