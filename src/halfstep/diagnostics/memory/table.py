"""The bytes of a training step as a value: what holds them, and in which dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from halfstep.shown import aligned, as_html

REASONS = {
    "state": "{share} are weights, gradients and optimizer state",
    "state_of_mixed": (
        "{share} are weights, gradients and optimizer state, which a *-mixed policy keeps in fp32"
    ),
    "wide_logits": "{share} are logits in fp32 (softmax, norms and losses compute in it)",
    "wide_activations": "{share} are activations in fp32 (softmax, norms and losses compute in it)",
    "casts": "{share} are 16-bit copies of weights that come on top",
    "halved": "{share} are saved tensors that 16 bits have halved",
}
"""A reason why 16 bits saved less than half, by name, to the words for it."""

PARTS = {
    "weights": "parameters and buffers",
    "masters": "fp32 copies that the optimizer updates, and remainders",
    "gradients": "of all trained parameters",
    "moments": "the optimizer's running averages",
    "cast copies": "16-bit copies of fp32 weights, kept from forward to backward",
    "activations": "saved by the forward for the backward",
    "logits": "saved tensors of the logits' size: the loss computes in fp32",
    "batch": "inputs and targets",
}
"""Part of the memory to its meaning."""
SAVED = ("cast copies", "activations", "logits")
"""What lives from the forward to the backward, and grows with the batch but for the casts."""


class Reason(NamedTuple):
    """A reason why 16 bits saved less than half, and its share of the memory."""

    name: str
    share: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What a training step holds, at the end of its forward and with all gradients.

    Temporary tensors of single operations, the allocator's rounding and the process itself come on
    top.

    Attributes:
        policy: The policy's name.
        measured: Whether a step was run, or only its shapes.
        bytes: Part and dtype to bytes, as ``{"logits": {"fp32": 4096}}``.
        rows: Rows of the batch: the length of its first tensor; 0 without a batch.
        ranks: Ranks that share weights, masters, gradients and moments.
    """

    policy: str
    measured: bool
    bytes: Mapping[str, Mapping[str, int]]
    rows: int = 0
    ranks: int = 1

    def part(self, name: str) -> int:
        """Bytes of one part, in all dtypes."""
        return sum(self.bytes.get(name, {}).values())

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(map(self.part, PARTS))

    @property
    def saved(self) -> int:
        """Bytes that live from the forward to the backward."""
        return sum(map(self.part, SAVED))

    def parts_text(self) -> str:
        """The parts in a line: ``weights 3.76 MB, gradients 3.76 MB``."""
        return ", ".join(
            f"{name} {size_text(self.part(name))}" for name in PARTS if self.part(name)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "total": self.total}

    def largest_batch(self, have: int) -> int:
        """The most rows that fit into a device, if what is saved grows with the rows; 0: none.

        Args:
            have: The device's bytes.
        """
        grows = self.part("activations") + self.part("logits") + self.part("batch")
        if not self.rows or not grows:
            return 0
        return max(0, int((have - (self.total - grows)) / (grows / self.rows)))

    def why_not_half(self) -> str:
        """Why 16-bit matmuls saved less than half of the memory, as a sentence."""
        parts = [REASONS[r.name].format(share=f"{r.share:.0%}") for r in self.reasons()]
        return f"Of {size_text(self.total)}, {'; '.join(parts)}."

    def reasons(self) -> list[Reason]:
        """What :meth:`why_not_half` says, by name and share of the total."""
        total = self.total or 1
        fixed = sum(map(self.part, ("weights", "masters", "gradients", "moments")))
        kept = "state_of_mixed" if "-mixed" in self.policy else "state"
        found = [Reason(kept, fixed / total)]
        for name in ("logits", "activations"):
            wide = self.bytes.get(name, {}).get("fp32", 0) / total
            found += [Reason(f"wide_{name}", wide)] if wide > 0.02 else []
        casts = self.part("cast copies") / total
        found += [Reason("casts", casts)] if casts > 0.005 else []
        low = sum(
            self.bytes.get(name, {}).get(form, 0)
            for name in ("activations", "logits")
            for form in ("bf16", "fp16")
        )
        return [*found, *([Reason("halved", low / total)] if low else [])]

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def __str__(self) -> str:
        rows = [("part", "bytes", "by dtype")]
        for name in PARTS:
            found = self.bytes.get(name, {})
            if self.part(name):
                rows.append((name, size_text(self.part(name)), _forms(found)))
        rows.append(("total", size_text(self.total), f"{self.policy}, {self._how()}"))
        return aligned(rows, {1})

    def _how(self) -> str:
        how = "measured" if self.measured else "estimated"
        return f"{how}, on each of {self.ranks} ranks" if self.ranks > 1 else how


def _forms(found: Mapping[str, int]) -> str:
    texts = [f"{dtype} {size_text(size)}" for dtype, size in found.items()]
    return ", ".join(texts)


def size_text(size: float) -> str:
    """Bytes with a unit of 1000: ``59.3 MB``."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"
