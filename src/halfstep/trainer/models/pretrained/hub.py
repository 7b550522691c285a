"""Resolves the source of a pretrained model, a folder or a Hugging Face hub name, to a folder."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfstep.errors import CheckpointError, ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""What is downloaded: no pickles; Python only where remote code is trusted."""


def resolve_source(
    source: str | os.PathLike[str], *, revision: str = "", trust_remote_code: bool = False
) -> Path:
    """Return the local folder of a model that is given as a folder or as a hub name.

    If the hub does not answer, or ``HF_HUB_OFFLINE`` is set, an earlier download is used.

    Args:
        source: A folder, or ``name`` or ``owner/name`` on the hub.
        revision: Branch, tag or commit of a hub name; "" is its main branch.
        trust_remote_code: Download Python files too.

    Raises:
        ConfigError: If the source is neither; if the name or revision does not exist; if the hub
            cannot be reached and nothing was downloaded before; or if a library is missing.
        CheckpointError: If the folder holds a pipe, a socket or a device.
    """
    text, folder = _place(source, revision)
    folder = folder or _downloaded(text, revision or "main", trust_remote_code)
    nested = folder / "0_Transformer"  # older folders of sentence-transformers
    if not (folder / "config.json").exists() and (nested / "config.json").exists():
        folder = nested
    require_plain_files(folder)
    return folder


def require_plain_files(folder: Path) -> None:
    """Raise CheckpointError for a pipe, socket or device in a folder, as reading could hang."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CheckpointError(
                f"{path} is not a regular file; a model is read from plain files only: remove it"
            )


def pin(
    source: str | os.PathLike[str], revision: str = "", *, trust_remote_code: bool = False
) -> str:
    """Return the current commit of a hub name's revision, to be passed as ``revision`` later on.

    A branch may move between two calls, so a model and its tokenizer, each resolved by the branch's
    name, could come from two commits. This downloads the files that :func:`resolve_source` needs
    and returns their commit; without the hub, that of an earlier download. Arguments are those of
    :func:`resolve_source`.

    Returns:
        40 hexadecimal digits; "" for a folder.

    Raises:
        ConfigError: As :func:`resolve_source`.
    """
    text, folder = _place(source, revision)
    # The cache's layout: snapshots/COMMIT.
    return "" if folder else _downloaded(text, revision or "main", trust_remote_code).name


def _place(source: str | os.PathLike[str], revision: str) -> tuple[str, Path | None]:
    """Return the source as text, and its folder, or None if it may be a hub name."""
    text = os.fspath(source)
    folder = Path(os.path.expanduser(text))
    if text and folder.is_dir():
        if revision:
            raise ConfigError(f"revision {revision!r} is for hub names, but {folder} is a folder")
        return text, folder
    if text and folder.exists():
        raise ConfigError(f"model {text!r} is a file; give the folder that holds config.json")
    if not _NAME.fullmatch(text) or ".." in text or "--" in text:
        raise ConfigError(
            f"model {text!r} is neither an existing folder nor a hub name (name or owner/name)"
        )
    return text, None


def _downloaded(name: str, revision: str, trust_remote_code: bool) -> Path:
    """Return the snapshot of a hub name in the cache, downloading it if needed."""
    hub = require_library("huggingface_hub")
    errors = hub.errors
    patterns = [*_FILES, "*.py"] if trust_remote_code else list(_FILES)
    if ".." in revision or Path(revision).is_absolute():
        raise ConfigError(f"revision {revision!r} is not a branch, tag or commit")
    try:
        with quiet():
            return Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"model {name!r} is gated: accept its terms on its hub page, then run `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"model {name!r} has no revision {revision!r} on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"model {name!r} is neither an existing folder nor a name on the hub (private names "
            "need `hf auth login`)"
        ) from error
    except Exception as error:  # any kind of network failure, without an earlier download
        offline = hub.is_offline_mode()
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub cannot be reached ({line})"
        raise ConfigError(
            f"model {name!r} is not a folder here, is not in the download cache, and {why}. Where "
            f"there is a network, run `hf download {name} --local-dir DIR`, bring DIR here and "
            "give it as the model"
        ) from error


def require_library(module: str) -> Any:
    """Import an optional library, or raise an error that says what to install.

    Args:
        module: ``"transformers"``, ``"huggingface_hub"`` or ``"peft"``.

    Raises:
        ConfigError: If it is not installed, or too old to be safe.
    """
    # Imported here, as these are optional dependencies: the extra "hf".
    try:
        if module == "transformers":
            import transformers

            _require_gate(transformers.__version__)
            return transformers
        if module == "peft":
            import peft

            return peft
        import huggingface_hub.errors
        import huggingface_hub.utils

        return huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"fine-tuning and pretrained models need {module}, which is missing: "
            "pip install 'halfstep[hf]'"
        ) from error


def _require_gate(version: str) -> None:
    """Raise ConfigError for a ``transformers`` that would run kernels named by a model folder.

    **Source:** CVE-2026-4372; 5.3.0 is the first version whose ``get_kernel`` refuses such kernels.
    """
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    if numbers < [5, 3]:
        raise ConfigError(
            f"transformers {version} is installed, which can run code that a model folder names; "
            "5.3 or newer is needed: pip install 'halfstep[hf]'"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence ``transformers``' load reports, progress bars and warnings within the block."""
    logging = require_library("transformers").utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
