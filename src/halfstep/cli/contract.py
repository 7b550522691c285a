"""The command ``contract``: records the dtypes of any training program, or compares them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from halfstep.cli.commands import ContractCheck, ContractRecord
from halfstep.cli.listening import VARIABLE
from halfstep.diagnostics.contract import Contract, difference_text, notes, united
from halfstep.errors import ConfigError, DataError

_INJECTED = Path(__file__).parent / "injected"


def run(arguments: ContractRecord | ContractCheck) -> int:
    """Run the program, and write or compare its contract; its own failure is the code."""
    if not arguments.command:
        raise ConfigError("no program; write it after --, as in: -- torchrun train.py")
    file = Path(arguments.file)
    if isinstance(arguments, ContractCheck):
        before = Contract.read(file)
        code, now = _recorded(arguments, quiet=arguments.json)
        differs = _checked(arguments, before, now)
        return code or differs
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ConfigError(f"{file}: cannot be written: no such folder, or it is one")
    code, now = _recorded(arguments)
    now.write(file)
    rows = sum(map(len, now.lines().values()))
    print(f"{file}: {rows} rows of {_size(now)}, {now.steps} steps")
    found = now.findings()
    for one in found:
        print(one)
    return code or int(bool(found))


def _checked(arguments: ContractCheck, before: Contract, now: Contract) -> int:
    found = before.differences(now)
    if arguments.json:
        told = [{"level": f.level, "name": f.name, "what": f.what, "do": f.do,
                 "where": f.where, "values": f.values} for f in found]  # fmt: skip
        print(json.dumps({"format": 1, "command": "contract", "findings": told,
                          "notes": notes(before, now)}))  # fmt: skip
        return int(bool(found))
    names = f"{arguments.file} and {_size(now)} of {' '.join(arguments.command):.100}"
    print(difference_text(before, now, found, names))
    if found:
        words = " ".join(arguments.command)
        print(f" do: if that is meant: halfstep contract record --file {arguments.file} -- {words}")
    return int(bool(found))


def _recorded(
    arguments: ContractRecord | ContractCheck, *, quiet: bool = False
) -> tuple[int, Contract]:
    """Run the program with the recorder in all of its processes; its code, and what was seen."""
    command = [*arguments.command]
    if arguments.nproc:
        python = Path(command[0]).name.startswith("python")
        launch = [command[0] if python else sys.executable, "-m", "torch.distributed.run"]
        launch += ["--nproc-per-node", str(arguments.nproc)]
        command = [*launch, *(command[1:] if python else ["--no-python", *command])]
    with TemporaryDirectory() as folder:
        wanted = {"folder": folder, "steps": arguments.steps, "stop": arguments.stop}
        path = os.pathsep.join(filter(None, (str(_INJECTED), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {VARIABLE: json.dumps(wanted), "PYTHONPATH": path}
        code = subprocess.call(command, env=environment, stdout=sys.stderr if quiet else None)
        parts = [_part(each) for each in sorted(Path(folder).glob("*.json"))]
    code = 128 - code if code < 0 else code
    if not parts:
        failed = f"it ended with code {code}" if code else "its Python reads no PYTHONPATH?"
        raise DataError(f"nothing was recorded: {command[0]} took no optimizer step; {failed}")
    return code, united(parts)


def _part(path: Path) -> Contract:
    read = json.loads(path.read_text())
    rows = {(section, key, form): {*where} for section, key, form, where in read.pop("rows")}
    return Contract(rows, **read)


def _size(found: Contract) -> str:
    return f"{found.world} rank{'s' * (found.world > 1)}"
