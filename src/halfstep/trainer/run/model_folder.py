"""Reads, copies and replaces the model folder that a run leaves behind for others to load."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import nn

from halfstep.errors import CheckpointError, ConfigError
from halfstep.files import sync


def model_folder(run: Path) -> Path:
    """Return the folder in which a run of ``finetune`` left its best state.

    Raises:
        ConfigError: If the run has not ended yet.
    """
    folder = run / "model"
    if not folder.is_dir():
        raise ConfigError(
            f"--run {run} has no model yet: it is written when the run ends; go on with it by "
            f"halfstep finetune classify (or lm) --resume --output-dir {run}"
        )
    return folder


def matrix_parameters(model: nn.Module) -> int:
    """Count the matrix weights that each token is multiplied with, for estimates of FLOPs.

    Embeddings do not count, as they are looked up, unless they also serve as the output layer.
    """
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    used = [p for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()]
    multiplied = {id(p) for p in used}
    return sum(
        p.numel()
        for p in model.parameters()
        if p.dim() == 2 and (id(p) not in looked_up or id(p) in multiplied)
    )


def frozen_fingerprint(model: nn.Module) -> str:
    """Hash the frozen parameters: SHA-256 over their names, shapes, dtypes and sampled values."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 1024)].float().numpy()
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
            digest.update(sample.tobytes())
    return digest.hexdigest()


def replace_folder(final: Path, write: Callable[[Path], object]) -> None:
    """Write a folder completely, then put it in the place of an earlier one.

    Args:
        final: The folder to replace.
        write: Makes and fills a folder that does not exist yet.

    Raises:
        CheckpointError: If it cannot be written; the earlier folder stays.
    """
    temporary = final.with_name(f".unfinished-{final.name}")
    old = final.with_name(f".old-{final.name}")
    try:
        if old.exists() and not final.exists():  # an earlier process died between the two renames
            old.rename(final)
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)
        write(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{final} cannot be written: {error}") from error
