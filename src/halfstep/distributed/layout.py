"""How the ranks of a run share the work, as one frozen value: ``data=2,tensor=2``."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from halfstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes; their product is the number of ranks.

    Ranks are numbered row by row in the order of the fields: ``data=2,tensor=2`` puts ranks 0 and 1
    into one tensor group, so that neighbours, which are on one machine, talk most.
    """

    data: int = 1
    """Copies of the model that share the batch."""
    shard: int = 1
    """Ranks that share the batch and hold a part of every parameter each (FSDP2)."""
    tensor: int = 1
    """Ranks that share every matrix product (tensor parallel)."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a size that is no integer above 0."""
        for name, size in self.axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"parallel: {name}={size!r}; allowed: integers >= 1")

    @property
    def size(self) -> int:
        """Number of ranks: the product of all axes."""
        return math.prod(self.axes.values())

    @property
    def axes(self) -> dict[str, int]:
        """Axis name to size, all axes, in the order of the mesh."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def batch_ranks(self) -> int:
        """Ranks with different data."""
        return self.data * self.shard

    def batch_rank(self, rank: int) -> int:
        """Which share of the batch a rank takes, of ``batch_ranks``."""
        return rank // self.tensor

    def __str__(self) -> str:
        parts = [f"{name}={size}" for name, size in self.axes.items() if size > 1]
        return ",".join(parts) or "data=1"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``"data=2,tensor=2"``; an empty text is one device.

        Raises:
            ConfigError: For an unknown or repeated axis, a size that is no integer above 0, or what
                is no text.
        """
        if not isinstance(text, str):
            raise ConfigError(f"the layout is {text!r}; allowed: text such as data=2")
        allowed = ", ".join(field.name for field in fields(cls))
        sizes: dict[str, int] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, equals, number = part.partition("=")
            if name not in cls.__dataclass_fields__ or not equals:
                raise ConfigError(
                    f"parallel={text!r}: {part!r}; allowed axes: {allowed}, as data=2"
                )
            if name in sizes:
                raise ConfigError(f"parallel={text!r}: {name} stands twice")
            if not number.isdecimal() or int(number) < 1:
                raise ConfigError(f"parallel={text!r}: {name}={number!r}; allowed: integers >= 1")
            sizes[name] = int(number)
        return cls(**sizes)

    @classmethod
    def of(cls, layout: str | Layout) -> Layout:
        """A layout, or what its spelling means: :meth:`parse`.

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
        """The layout of a run with ``world_size`` ranks; an empty text means ``data=world_size``.

        Args:
            text: A layout, or its spelling.
            world_size: How many ranks there are.

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
