"""The ways to train one classifier that the tutorials compare: the rows of ``make ways``, and why.

A row that this machine cannot run stands in the table with the reason.
"""

from __future__ import annotations

from importlib.util import find_spec

NINE = (
    "torch fp32",
    "torch bf16",
    "dataparallel fp32",
    "2 x ddp fp32",
    "2 x ddp spawn fp32",
    "2 x ddp fp16",
    "2 x ddp bf16",
    "2 x deepspeed bf16",
    "accelerate bf16",
    "trainer bf16",
    "trainer bf16, length groups",
    "lightning bf16",
    "halfstep fp32",
    "halfstep bf16-mixed",
    "halfstep bf16-split",
    "2 x halfstep bf16-mixed",
)
"""Rows of classify_rows.py; ``2 x ddp bf16`` is what the tutorials find to be the fastest."""

DEFAULTS = {"max_steps": 300, "rounds": 1, "layers": 2, "width": 128, "batch_size": 64,
            "learning_rate": 1e-3}  # fmt: skip
"""Of ``--nine``: enough steps to learn more than which class is the largest, in a few minutes."""


def absent(device: str) -> dict[str, str]:
    """Ways of the tutorials' table that this machine cannot run on a device, and why."""
    found: dict[str, str] = {}
    if device != "cpu":
        why = "rows of two processes are run on CPUs alone: --device cpu"
        found |= {name: why for name in NINE if name.startswith("2 x ")}
    found |= {
        "2 x horovod": (
            "Horovod 0.28.1, the newest on PyPI, is compiled as C++14, and torch's headers "
            "need C++17"
        )
    }
    if find_spec("deepspeed") is None and device == "cpu":
        found["2 x deepspeed bf16"] = (
            "deepspeed is not installed; pip install deepspeed, which needs a C++ compiler, and "
            "DS_ACCELERATOR=cpu"
        )
    return found


NOTES = {
    "torch fp32": "a plain loop",
    "torch bf16": "torch.autocast",
    "dataparallel fp32": "needs two GPUs; on a CPU it runs the model as it is",
    "2 x ddp fp32": "torchrun",
    "2 x ddp spawn fp32": "mp.spawn",
    "2 x ddp fp16": "torchrun, torch.autocast, GradScaler",
    "2 x ddp bf16": "torchrun, torch.autocast",
    "2 x deepspeed bf16": "torchrun; ZeRO stage 1, weights in bf16 with fp32 masters",
    "lightning bf16": "AdamW without fused=True, for which Lightning clips in no mixed precision",
    "trainer bf16, length groups": "batches of texts of similar length, as halfstep's are",
    "2 x halfstep bf16-mixed": "torchrun",
}


def note(name: str, row: dict) -> str:
    """What a reader of the table must know of a row."""
    told = [NOTES[name]] if name in NOTES else []
    if row["extrapolated"]:
        lacking = "fp16" if "fp16" in name else "bf16"
        steps = row["rounds"][0]["steps"]
        told.append(f"torch's {lacking} products are slow on this CPU: from {steps} steps")
    return "; ".join(told)
