"""The command ``contract``: records the dtypes of any training program, or compares them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from halfstep.cli.commands import ContractCheck, ContractRecord
from halfstep.diagnostics.contract import Contract, united
from halfstep.errors import ConfigError, DataError

_INJECTED = Path(__file__).parent / "injected"


def run(arguments: ContractRecord | ContractCheck) -> int:
    """Run the program, and write or compare its contract; a code of its own is the command's."""
    if not arguments.command:
        raise ConfigError("no program is given; write it after --, as in -- torchrun train.py")
    file = Path(arguments.file)
    if isinstance(arguments, ContractCheck):
        before = Contract.read(file)
        code, now = _recorded(arguments, quiet=arguments.json)
        found = before.differences(now)
        names = f"{file} and {_ranks(now)} of {' '.join(arguments.command):.100}"
        told = {"format": 1, "command": "contract", "findings": [*map(asdict, found)]}
        print(json.dumps(told) if arguments.json else before.text(now, names))
        if found and not arguments.json:
            print(" do: if that is meant, halfstep contract record with the same words")
    elif file.is_dir() or not file.absolute().parent.is_dir():
        raise ConfigError(f"{file}: is a folder, or in none; give another --file")
    else:
        code, now = _recorded(arguments)
        now.write(file)
        found = now.findings()
        print(f"{file}: {len(now.rows)} rows of {_ranks(now)}, {now.steps} steps", *found, sep="\n")
    return code or int(bool(found))


def _ranks(found: Contract) -> str:
    return f"{found.world} rank{'s' * (found.world > 1)}"


def _recorded(
    arguments: ContractRecord | ContractCheck, *, quiet: bool = False
) -> tuple[int, Contract]:
    """Run the program with the recorder in all of its processes: its code, and what was seen."""
    command = [*arguments.command]
    if arguments.nproc:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
        command = [*launcher, "--nproc-per-node", str(arguments.nproc), *command]
    with TemporaryDirectory() as folder:
        wanted = {"folder": folder, "steps": arguments.steps, "stop": arguments.stop}
        path = os.pathsep.join(filter(None, (str(_INJECTED), os.environ.get("PYTHONPATH"))))
        variables = {"HALFSTEP_CONTRACT": json.dumps(wanted), "PYTHONPATH": path}
        output = sys.stderr if quiet else None
        code = subprocess.call(command, env=os.environ | variables, stdout=output)
        parts = [Contract.read(part) for part in Path(folder).glob("*.json")]
    if not parts and not code:
        raise DataError(
            f"nothing was recorded of {command[0]}: it took no optimizer step, in a Python that "
            "reads PYTHONPATH and has halfstep"
        )
    if not parts:
        print(f"halfstep: nothing was recorded: it ended with code {code}", file=sys.stderr)
        raise SystemExit(code)
    return 128 - code if code < 0 else code, united(parts)
