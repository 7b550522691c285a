"""The bytes of a training step as a value: what holds them, and in which dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from halfstep.shown import as_html, bars

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
    ranks: int = field(default=1)

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
        """Why 16-bit products saved less than half of the memory, as a sentence."""
        total = self.total
        fixed = sum(map(self.part, ("weights", "masters", "gradients", "moments")))
        wide = {name: self.bytes.get(name, {}).get("fp32", 0) for name in ("logits", "activations")}
        kept = ", which a *-mixed policy keeps in fp32" if "-mixed" in self.policy else ""
        parts = [f"{fixed / total:.0%} are weights, gradients and optimizer state{kept}"]
        parts += [
            f"{size / total:.0%} are {name} in fp32 (softmax, norms and losses compute in it)"
            for name, size in wide.items()
            if size > 0.02 * total
        ]
        if self.part("cast copies") > 0.005 * total:
            share = self.part("cast copies") / total
            parts.append(f"{share:.0%} are 16-bit copies of weights that come on top")
        low = sum(
            self.bytes.get(name, {}).get(form, 0)
            for name in ("activations", "logits")
            for form in ("bf16", "fp16")
        )
        rest = f"{low / total:.0%} are saved tensors that 16 bits have halved"
        return f"Of {size_text(total)}, {'; '.join([*parts, rest])}."

    def _repr_html_(self) -> str:
        parts = {p: {d: b / 1e6 for d, b in forms.items()} for p, forms in self.bytes.items()}
        return as_html(str(self), bars(parts, "MB by part and dtype"))

    def __str__(self) -> str:
        rows = [("part", "bytes", "by dtype")]
        for name in PARTS:
            found = self.bytes.get(name, {})
            if self.part(name):
                forms = ", ".join(f"{dtype} {size_text(size)}" for dtype, size in found.items())
                rows.append((name, size_text(self.part(name)), forms))
        rows.append(("total", size_text(self.total), f"{self.policy}, {self._how()}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in rows
        )  # fmt: skip

    def _how(self) -> str:
        how = "measured" if self.measured else "estimated"
        return f"{how}, on each of {self.ranks} ranks" if self.ranks > 1 else how


def size_text(size: float) -> str:
    """Bytes with a unit of 1000: ``59.3 MB``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"
