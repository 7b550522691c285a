"""The layout of a run, ``data=2,tensor=2``: how its ranks share the work, as a frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from halfstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes; their product is the number of ranks.

    Ranks are numbered in row-major order of the fields: ``data=2,tensor=2`` puts ranks 0 and 1 into
    one tensor group, so that neighbours, usually on one machine, communicate most.
    """

    data: int = 1
    """Number of copies of the model, which share the batch."""
    shard: int = 1
    """Number of ranks that share the batch and each hold a part of every parameter (FSDP2)."""
    tensor: int = 1
    """Number of ranks that share every matrix product (tensor parallel)."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a size that is not a positive integer."""
        if not all(type(size) is int and size > 0 for size in self.axes.values()):
            raise ConfigError(f"the layout has sizes {self.axes}; allowed: integers >= 1")

    @property
    def size(self) -> int:
        """Number of ranks: the product of all axes."""
        return math.prod(self.axes.values())

    @property
    def axes(self) -> dict[str, int]:
        """Name to size of all axes, in the order of the mesh."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def batch_ranks(self) -> int:
        """Number of ranks with different data."""
        return self.data * self.shard

    def batch_rank(self, rank: int) -> int:
        """Return the index of a rank's share of the batch, among ``batch_ranks``."""
        return rank // self.tensor

    def __str__(self) -> str:
        parts = [f"{name}={size}" for name, size in self.axes.items() if size > 1]
        return ",".join(parts) or "data=1"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``"data=2,tensor=2"``; an empty text is one device.

        Raises:
            ConfigError: For an unknown or repeated axis, or a size that is not a positive integer.
        """
        allowed = ", ".join(field.name for field in fields(cls))
        sizes: dict[str, int] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, number = part.partition("=")
            known = name in cls.__dataclass_fields__ and name not in sizes
            if not (known and number.isdecimal() and int(number)):
                raise ConfigError(
                    f"parallel={text!r}: {part!r}; allowed: each of {allowed} once, as data=2"
                )
            sizes[name] = int(number)
        return cls(**sizes)

    @classmethod
    def of(cls, layout: str | Layout) -> Layout:
        """Return a layout as it is, or :meth:`parse` its spelling.

        Raises:
            ConfigError: If it is neither.
        """
        if isinstance(layout, Layout):
            return layout
        if isinstance(layout, str):
            return cls.parse(layout)
        raise ConfigError(f"the layout is {layout!r}; allowed: a Layout, or text such as data=2")

    @classmethod
    def choose(cls, text: str | Layout, world_size: int) -> Layout:
        """Return the layout of a run with ``world_size`` ranks; empty text: ``data=world_size``.

        Args:
            text: A layout, or its spelling.
            world_size: Number of ranks in the run.

        Raises:
            ConfigError: If the layout needs another number of ranks.
        """
        layout = cls(data=world_size) if text == "" else cls.of(text)
        if layout.size != world_size:
            raise ConfigError(
                f"parallel={layout} needs {layout.size} ranks, the run has {world_size}; start it "
                f"with --nproc {layout.size} (torchrun --nproc-per-node {layout.size}), or choose "
                f"a layout whose product is {world_size}"
            )
        return layout
