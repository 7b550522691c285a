"""What ranks have alike, and what each has for itself."""

from __future__ import annotations

import hashlib
from importlib import metadata

import torch

from halfstep.training.config import config_to_table
from halfstep.training.run_config import BaseConfig


def facts(config: BaseConfig) -> dict[str, str]:
    """What all ranks must have alike: versions, and every key but where data is kept."""
    table = config_to_table(config)
    table["data"].pop("cache_dir", None)
    sections = {name: part for name, part in table.items() if isinstance(part, dict)}
    facts = {"torch version": torch.__version__, "halfstep version": metadata.version("halfstep")}
    facts |= {name: str(value) for name, value in table.items() if name not in sections}
    return facts | {
        f"{name}.{key}": str(value)
        for name, part in sections.items()
        for key, value in part.items()
    }


def share_of(size: int, rank: int, ranks: int) -> range:
    """Which of ``size`` things a rank takes; the shares follow each other without a gap."""
    return range(rank * size // ranks, (rank + 1) * size // ranks)


def dropout_seed(seed: int, step: int, first_row: int) -> int:
    """A seed for each micro-batch, by its first row in the step's batch.

    So a resumed run needs no random state, and a rank's masks are those of a micro-batch of one
    process that begins at the same row.
    """
    text = f"dropout {seed} {step} {first_row}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
