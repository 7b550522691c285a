"""How N ranks make one checkpoint without a collective: receipts, then rank 0's rename.

Every rank writes its files into ``.unfinished-step-00000100-TOKEN`` and then its receipt there, by
rename. Rank 0 waits for all receipts, sees that the pieces make up every tensor, writes the
manifest, and renames the folder: ``step-00000100`` is there whole or not at all. So a save can run
in a thread beside training, whose collectives it must not mix with.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from halfstep.errors import CheckpointError, NonFiniteError
from halfstep.files import sync, sync_folder
from halfstep.trainer.checkpoint.index import FORMAT, MANIFEST, SECTIONS, check_index, read_json
from halfstep.trainer.checkpoint.parts import Part, write_part

TEMPORARY = ".unfinished-"  # being written or being removed
TIMEOUT = 600.0  # seconds: a rank may be slower by as much as a large file takes on a shared disk
_NAME = re.compile(r"step-(\d{8,})")
_TOKEN = re.compile(r"([A-Za-z0-9_-]{1,64})(?:\.(\d{1,9}))?")
_LEFTOVER = re.compile(rf"{re.escape(TEMPORARY)}step-\d{{8,}}-{_TOKEN.pattern}")


@dataclass(frozen=True, slots=True)
class Team:
    """The processes that write a checkpoint together.

    Attributes:
        rank: This process's.
        size: How many there are.
        token: Of letters, digits, ``-`` and ``_``, perhaps with ``.NUMBER`` behind it. The same on
            all ranks, and another one in every attempt to save: a restarted run, or a step saved
            again after an error. Within a run, later saves have higher numbers. One process needs
            none.
        timeout: Seconds that rank 0 waits for the others' receipts.
    """

    rank: int = 0
    size: int = 1
    token: str = ""
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size):
            raise CheckpointError(f"rank {self.rank} of {self.size} ranks cannot save")
        if not _TOKEN.fullmatch(self.token) and (self.size > 1 or self.token):
            raise CheckpointError(
                f"a save by {self.size} ranks has the token {self.token!r}; allowed: 1 to 64 "
                "letters, digits, - and _, then perhaps . and a number, the same on every rank"
            )


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where a step's checkpoint is, if there is one."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run's ``checkpoints`` folder, oldest first.

    A folder without a manifest is none: a save gives its folder the name with the manifest in it.
    """
    return [path for path in _named(folder) if os.path.lexists(path / MANIFEST)]


def passed_over(folder: Path) -> list[Path]:
    """What has a checkpoint's name, and a later one than all checkpoints, but is none."""
    found = _named(folder)
    good = [i for i, path in enumerate(found) if os.path.lexists(path / MANIFEST)]
    return found[good[-1] + 1 :] if good else found


def _named(folder: Path) -> list[Path]:
    """All with a checkpoint's name, in the order of their steps."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def require_step(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint under another step's name: what comes after it would be miscounted.

    Args:
        path: The checkpoint's folder; one that has no step in its name may hold any.
        state: Its ``state.json``.

    Raises:
        CheckpointError: With both steps.
    """
    named = _NAME.fullmatch(path.name)
    if named and state.get("step") != int(named[1]):
        raise CheckpointError(
            f"{path} holds step {state.get('step')!r:.40}: it was renamed or copied. Remove it to "
            "go on from the checkpoint before it, or give it its own name back"
        )


def save_part(
    folder: Path, step: int, part: Part, keep: int, team: Team, spared: int | None = None
) -> Path:
    """Write this rank's part of a checkpoint; on rank 0, complete it.

    Then all but the newest ``keep`` are removed, and but this one and that of the step ``spared``.

    Returns:
        The checkpoint's folder. On rank 0 it is complete; on the others it will be, unless rank 0
        raises.

    Raises:
        NonFiniteError: If a weight or moment is NaN or inf: on the rank that has it and on rank 0.
        CheckpointError: If this rank's files cannot be written; on rank 0, if any rank's cannot,
            a receipt is missing, the pieces do not make up a tensor, or there is something else
            under the checkpoint's name.
    """
    broken = part.first_nonfinite()
    if broken and team.size == 1:
        raise _nonfinite([broken])
    final = checkpoint_path(folder, step)
    temporary = folder / f"{TEMPORARY}{final.name}{f'-{team.token}' if team.token else ''}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if team.rank == 0:
            _remove_leftovers(folder, team)
        temporary.mkdir(exist_ok=team.size > 1)
        report, failure = _written(part, temporary, team, broken)
        if team.rank:
            _hand_in(temporary, team.rank, report, failure, broken)
            return final
        try:
            reports = [report, *_receipts(temporary, final, team)]
        except CheckpointError as error:
            raise (error if failure is None else failure) from None
        _require_good(reports, final)
        _commit(temporary, final, reports)
    except (OSError, SafetensorError) as error:
        if team.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise _unwritten(final, str(error)) from error
    except (CheckpointError, NonFiniteError):
        if team.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    _prune(folder, keep, {final, checkpoint_path(folder, step if spared is None else spared)})
    return final


def _written(
    part: Part, temporary: Path, team: Team, broken: str
) -> tuple[dict[str, Any], Exception | None]:
    """A rank's report of the files that it has written, and why it could not, if others wait."""
    if broken:
        return {"nonfinite": broken}, None
    try:
        return write_part(part, temporary, team.rank, team.size), None
    except (OSError, SafetensorError) as error:
        if team.size == 1:
            raise
        return {"error": str(error)}, error


def _hand_in(
    temporary: Path, rank: int, report: dict[str, Any], failure: Exception | None, broken: str
) -> None:
    """Give rank 0 a receipt, and raise what this rank has to complain of."""
    if failure is not None:
        _tell(temporary, rank, report)
        raise failure
    _write_receipt(temporary, rank, report)
    if broken:
        raise _nonfinite([broken])


def _commit(temporary: Path, final: Path, reports: list[dict[str, Any]]) -> None:
    manifest = _merged(reports, final)
    check_index(manifest, final / MANIFEST)
    missing = [name for name in manifest["files"] if not (temporary / name).is_file()]
    if missing:
        raise _unwritten(
            final,
            f"rank 0 does not see {', '.join(missing[:5])} of other ranks",
            "See that all ranks share the run's folder",
        )
    (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for rank in range(1, len(reports)):
        (temporary / _receipt(rank)).unlink()
    if os.path.lexists(final):
        _require_same(final, manifest)
        shutil.rmtree(temporary)
        return
    sync_folder(temporary)
    os.rename(temporary, final)
    sync(final.parent)


def _require_same(final: Path, manifest: dict[str, Any]) -> None:
    """Refuse what lies under a checkpoint's name, unless it is that checkpoint, file for file."""
    try:
        same = bool(read_json(final / MANIFEST) == manifest)
        missing = [name for name in manifest["files"] if not (final / name).is_file()]
    except CheckpointError:
        same, missing = False, []
    if not same or missing:
        raise _unwritten(
            final,
            "something else is there under its name",
            f"Look at {final} and move it away or remove it",
        )


def _merged(reports: list[dict[str, Any]], final: Path) -> dict[str, Any]:
    """One manifest of all ranks' reports."""
    manifest: dict[str, Any] = {"format": FORMAT, "files": {}, **{s: {} for s in SECTIONS}}
    for rank, report in enumerate(reports):
        manifest["files"] |= report["files"]
        for section in SECTIONS:
            for name, entry in report[section].items():
                whole = manifest[section].setdefault(name, {**entry, "pieces": []})
                if any(whole[key] != entry[key] for key in ("shape", "dtype")):
                    raise _unwritten(
                        final,
                        f"{name} is {entry['dtype']} of shape {entry['shape']} on rank {rank}, "
                        f"{whole['dtype']} of shape {whole['shape']} on a rank before it",
                        "Give every rank the same model and precision",
                    )
                whole["pieces"] += entry["pieces"]
    return manifest


def _receipt(rank: int) -> str:
    return f"receipt-{rank + 1:05d}.json"


def _write_receipt(folder: Path, rank: int, report: dict[str, Any]) -> None:
    path = folder / _receipt(rank)
    unnamed = path.with_suffix(".writing")
    unnamed.write_text(json.dumps(report), encoding="utf-8")
    os.rename(unnamed, path)


def _tell(folder: Path, rank: int, report: dict[str, Any]) -> None:
    """Make room, and tell rank 0 of the error, so that it need not wait."""
    for path in folder.glob(f"*-{rank + 1:05d}-of-*"):
        path.unlink(missing_ok=True)
    try:
        _write_receipt(folder, rank, report)
    except OSError:
        return  # rank 0 then names the missing receipt


def _receipts(folder: Path, final: Path, team: Team) -> list[dict[str, Any]]:
    """What ranks 1, 2, ... wrote."""
    found: dict[int, dict[str, Any]] = {}
    begin, pause = time.monotonic(), 0.002
    while missing := [r for r in range(1, team.size) if r not in found]:
        for rank in missing:
            if (folder / _receipt(rank)).exists():
                found[rank] = read_json(folder / _receipt(rank))
        missing = [r for r in missing if r not in found]
        if missing and time.monotonic() - begin > team.timeout:
            listed = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
            raise _unwritten(
                final,
                f"no receipt of rank{'s'[: len(missing) > 1]} {listed} after {team.timeout:g} s",
                "Look for what stopped them, and see that all ranks share the run's folder",
            )
        if missing:
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
    return [found[rank] for rank in range(1, team.size)]


def _require_good(reports: list[dict[str, Any]], final: Path) -> None:
    broken = [report["nonfinite"] for report in reports if "nonfinite" in report]
    if broken:
        raise _nonfinite(list(dict.fromkeys(broken)))
    for rank, report in enumerate(reports):
        if "error" in report:
            raise _unwritten(final, f"rank {rank}: {report['error']}")


def _nonfinite(names: list[str]) -> NonFiniteError:
    return NonFiniteError(
        f"{names[0]} is not finite: no checkpoint is written from it, and the last one stays as it "
        "is",
        cause="weights",
        parameters=tuple(names),
    )


def _unwritten(
    final: Path,
    why: str,
    advice: str = "Free space or move the run's folder to another disk",
) -> CheckpointError:
    kept = list_checkpoints(final.parent)
    last = f"the last checkpoint, {kept[-1]}, is intact" if kept else "there is no earlier one"
    return CheckpointError(
        f"checkpoint {final} cannot be written: {why}; {last}. {advice}, then go on with --resume"
    )


def _remove_leftovers(folder: Path, team: Team) -> None:
    """Remove what killed attempts left, not what other ranks already write of this or a later one.

    What cannot be removed is left: it is no reason to have no checkpoint.
    """
    own = _TOKEN.fullmatch(team.token)
    for path in folder.glob(f"{TEMPORARY}*"):
        other = _LEFTOVER.fullmatch(path.name)
        if own and other and own[1] == other[1] and team.size > 1:
            going_on = int(other[2] or 0) >= int(own[2] or 0)
        else:
            going_on = False
        if not going_on:
            shutil.rmtree(path, ignore_errors=True)


def _prune(folder: Path, keep: int, spared: Collection[Path]) -> None:
    for old in list_checkpoints(folder)[:-keep]:
        if old in spared:
            continue
        try:  # renamed first: a kill leaves no half of one
            shutil.rmtree(old.rename(folder / f"{TEMPORARY}{old.name}"))
        except OSError as error:
            raise CheckpointError(f"old checkpoint {old} cannot be removed: {error}") from error
