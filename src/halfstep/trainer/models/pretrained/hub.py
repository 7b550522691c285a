"""Resolves the source of a pretrained model, a folder or a Hugging Face hub name, to a folder."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError

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
        ConfigError: If the source is neither, or cannot be had; or if a library is missing.
    """
    text = os.fspath(source)
    folder = Path(os.path.expanduser(text))
    if revision and (folder.is_dir() or ".." in revision or revision.startswith("/")):
        raise ConfigError(f"revision {revision!r} is for hub names: a branch, tag or commit")
    if text and folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text):
        raise ConfigError(
            f"model {text!r} is neither an existing folder nor a hub name (name or owner/name)"
        )
    hub = require_library("huggingface_hub")
    patterns = [*_FILES, "*.py"] if trust_remote_code else list(_FILES)
    try:
        with quiet():
            found = hub.snapshot_download(text, revision=revision or None, allow_patterns=patterns)
    except Exception as error:  # unknown or gated names, and any kind of network failure
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        why = "HF_HUB_OFFLINE is set" if hub.is_offline_mode() else f"the hub answers: {line}"
        raise ConfigError(
            f"model {text!r} is not a folder here, is not in the download cache, and {why}. Where "
            f"there is a network, run `hf download {text} --local-dir DIR`, bring DIR here and "
            "give it as the model"
        ) from error
    return Path(found)


def pin(
    source: str | os.PathLike[str], revision: str = "", *, trust_remote_code: bool = False
) -> str:
    """Return the current commit of a hub name's revision, to be passed as ``revision`` later on.

    A branch may move between two calls, so a model and its tokenizer, each resolved by the branch's
    name, could come from two commits. Returns 40 hexadecimal digits; "" for a folder. For arguments
    and errors see :func:`resolve_source`.
    """
    folder = resolve_source(source, revision=revision, trust_remote_code=trust_remote_code)
    # The cache's layout: snapshots/COMMIT.
    return "" if os.path.isdir(os.path.expanduser(source)) else folder.name


def require_library(module: str) -> Any:
    """Import an optional library, or raise ConfigError that says what to install.

    **Source:** CVE-2026-4372; transformers 5.3.0 is the first whose ``get_kernel`` refuses kernels
    that a model folder names.
    """
    try:
        library = import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"fine-tuning and pretrained models need {module}, which is missing: "
            "pip install 'halfstep[hf]'"
        ) from error
    if module == "transformers":
        version = library.__version__
        if [int(part) for part in re.findall(r"\d+", version)[:2]] < [5, 3]:
            raise ConfigError(
                f"transformers {version} is installed, which can run code that a model folder "
                "names; 5.3 or newer is needed: pip install 'halfstep[hf]'"
            )
    return library


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
