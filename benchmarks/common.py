"""What the benchmarks share: where results go and what machine they ran on."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from statistics import median

import torch

from halfstep.trainer.environment import environment

RESULTS = Path(__file__).parent / "results"


def save(name: str, results: dict, device: torch.device) -> Path:
    """Write one JSON object: results, machine, versions, date."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{now[:10]}.json"
    content = {"benchmark": name, "date": now, **results, "machine": environment(device)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def summary(seconds: list[float]) -> dict[str, float]:
    """Minimum and median of a list of times."""
    return {"min_seconds": min(seconds), "median_seconds": median(seconds), "samples": len(seconds)}
