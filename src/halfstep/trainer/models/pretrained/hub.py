"""Where a pretrained model is: a folder, or a name of the Hugging Face hub that becomes one."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError

HUB_SECONDS = 10.0
"""Longest wait for the hub's first answer: a machine without a network must not seem to hang."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""What is downloaded: no pickles; Python only where remote code is trusted."""


def resolve_source(
    source: str | os.PathLike[str], *, revision: str = "", trust_remote_code: bool = False
) -> Path:
    """The local folder of a model that is named by a folder or by a hub name.

    A hub name is asked for once, with a bound of ``HUB_SECONDS``; where the hub does not answer,
    or ``HF_HUB_OFFLINE`` is set, an earlier download is taken.

    Args:
        source: A folder, or ``name`` or ``owner/name`` on the hub.
        revision: Branch, tag or commit of a hub name; "" is its main branch.
        trust_remote_code: Download Python files too.

    Raises:
        ConfigError: It is neither; the name or revision does not exist; the hub cannot be reached
            and nothing was downloaded before; or a library is missing.
    """
    text, folder = _place(source, revision)
    return folder or _downloaded(text, revision or "main", trust_remote_code)


def pin(
    source: str | os.PathLike[str], revision: str = "", *, trust_remote_code: bool = False
) -> str:
    """The commit that a hub name's revision is now; give it as ``revision`` from here on.

    A branch may move between two questions, so a model and its tokenizer, each resolved by the
    branch's name, could be of two commits. The commit is that of the files :func:`resolve_source`
    has, so they are downloaded, and without the hub it is that of the earlier download.

    Args:
        source: As :func:`resolve_source`.
        revision: As :func:`resolve_source`.
        trust_remote_code: As :func:`resolve_source`.

    Returns:
        40 hexadecimal digits; "" for a folder.

    Raises:
        ConfigError: As :func:`resolve_source`.
    """
    text, folder = _place(source, revision)
    # The cache's layout: snapshots/COMMIT.
    return "" if folder else _downloaded(text, revision or "main", trust_remote_code).name


def _place(source: str | os.PathLike[str], revision: str) -> tuple[str, Path | None]:
    """The source as text, and the folder that it is; None for what may be a hub name."""
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
    """The snapshot of a hub name in the cache, downloaded where it is not there."""
    hub = require("huggingface_hub")
    errors = hub.errors
    patterns = [*_FILES, "*.py"] if trust_remote_code else list(_FILES)
    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": patterns}
    offline = bool(hub.is_offline_mode())
    try:
        with _no_bars(hub):
            if not offline:
                # One request that is bounded; a download would try again and again.
                wanted["revision"] = _commit(hub, name, revision)
                folder = Path(hub.snapshot_download(name, **wanted))
                _note(folder, revision)
                return folder
            return Path(hub.snapshot_download(name, local_files_only=True, **wanted))
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
    except Exception as error:
        # httpx, OSError, LocalEntryNotFoundError, OfflineModeIsEnabled, ...: no answer.
        if not offline:
            try:
                wanted["revision"] = revision
                return Path(hub.snapshot_download(name, local_files_only=True, **wanted))
            except Exception:
                pass
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub cannot be reached ({_line(error)})"
        raise ConfigError(
            f"model {name!r} is not a folder here, is not in the download cache, and {why}. Where "
            f"there is a network, run `hf download {name} --local-dir DIR`, bring DIR here and "
            "give it as the model"
        ) from error


def _commit(hub: Any, name: str, revision: str) -> str:
    """The commit that a revision is now, or TimeoutError after ``HUB_SECONDS``.

    In a thread of its own, as a request's own limit holds for each address of the hub and not for
    the look-up of its name.
    """
    found: list[str] = []
    failed: list[Exception] = []

    def ask() -> None:
        try:
            info = hub.HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)
            found.append(info.sha or revision)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"no answer in {HUB_SECONDS:g} seconds")
    return found[0]


def _note(folder: Path, revision: str) -> None:
    """Notes in the cache which commit a branch or tag was, as the library does for its own calls.

    A download by commit leaves no such note, and without the hub the name would not be found.
    """
    refs = folder.parent.parent / "refs"
    ref = refs / revision
    known = folder.parent.name != "snapshots" or revision == folder.name
    if known or ".." in revision or not ref.is_relative_to(refs):
        return
    # A shared cache may be read-only; the model is there all the same.
    with suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        part = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        part.write_text(folder.name)
        part.replace(ref)


def require(module: str) -> Any:
    """An optional library, or an error that says what to install.

    Args:
        module: ``"transformers"``, ``"huggingface_hub"`` or ``"peft"``.

    Raises:
        ConfigError: It is not installed, or too old to be safe.
    """
    # Optional dependencies, the extra "hf".
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
            f"pretrained models need {module}, which is missing: pip install 'halfstep[hf]'"
        ) from error


def _require_gate(version: str) -> None:
    """Raises ConfigError for a ``transformers`` that runs kernels which a model folder names.

    **Source:** CVE-2026-4372; 5.3.0 is the first whose ``get_kernel`` refuses strangers.
    """
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    if numbers < [5, 3]:
        raise ConfigError(
            f"transformers {version} is installed, which can run code that a model folder names; "
            "5.3 or newer is needed: pip install 'halfstep[hf]'"
        )


@contextmanager
def _no_bars(hub: Any) -> Iterator[None]:
    """The hub's progress bars off, and on again if they were."""
    off = hub.utils.are_progress_bars_disabled()
    hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        if not off:
            hub.utils.enable_progress_bars()


def _line(error: Exception) -> str:
    """The first line of an error, at most 120 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
