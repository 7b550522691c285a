"""How far rounding may put the results of an operation apart."""

from __future__ import annotations

import math

from halfstep.diagnostics.records.recorded import Apart, Row
from halfstep.diagnostics.trace import is_product

# So many times more than its formats round, or than what it reads is off, a result may be off. In
# models trained in other formats, kernels, threads and layouts it was 2.7 times at most.
FACTOR = 8.0
FP32 = 2**-21  # with room for sums in another order
_ROUNDOFF = {"bf16": 2**-8, "fp16": 2**-11, "tf32": 2**-11, "e4m3": 2**-4, "e5m2": 2**-3,
             "fp8": 2**-3, "fp8-block": 2**-3, "mxfp8": 2**-3, "nvfp4": 2**-2}  # fmt: skip


def unit_of(*rows: Row) -> float:
    """The unit roundoff of the coarsest of all formats; of subnormal numbers that of their size."""
    forms = {form.split()[0] for row in rows for form in (*row.inputs, *row.outputs)}
    unit = max((_ROUNDOFF.get(form, FP32) for form in forms), default=FP32)
    norm = max(row.norm for row in rows)
    if "fp16" in forms and norm:
        unit = max(unit, min(1.0, 2**-25 * math.sqrt(rows[0].size) / norm))
    return unit


def cancels(op: str) -> bool:
    """Whether a backward takes differences inside, whose relative error has no bound."""
    return any(word in op for word in ("attention", "softmax", "norm", "entropy"))


def amplified(row: Row, found: Apart) -> float:
    """How much larger than that of its operands a result's relative error may well be.

    A sum of terms that cancel has the error of the terms. Errors of a matmul's operands are as good
    as random, so that they add as random numbers do. An exponential makes them absolute.
    """
    sizes, made = [r.norm for r in row.reads], found.norm or 1.0
    means = [size / math.sqrt(r.size or 1) for size, r in zip(sizes, row.reads, strict=True)]
    if not sizes:
        return 1.0
    if row.op in ("add", "sub", "rsub", "sum", "embedding_dense_backward", "cat", "var", "std"):
        return max(1.0, math.hypot(*sizes) / made)
    if row.op == "embedding":  # whose rows have all of the table's error
        rows = math.sqrt(max(1.0, row.size / (row.reads[0].size or 1)))
        return max(1.0, 2 * sizes[0] * rows / made)
    if row.op in ("mean", "index", "gather", "index_select", "pow", "cumsum", "norm"):
        return max(1.0, max(means) / (made / math.sqrt(row.size or 1)))
    if "softmax" in row.op or row.op in ("exp", "logsumexp", "sigmoid", "cos", "sin"):
        return max(1.0, *means)
    if is_product(row.op) and len(sizes) > 1:
        large = sorted(row.reads, key=lambda r: -r.size)[:2]
        terms = math.sqrt(max(1.0, large[0].size * large[1].size / (row.size or 1)))
        return max(1.0, large[0].norm * large[1].norm / math.sqrt(terms) / made)
    return 4.0 if "norm" in row.op else 1.0
