"""The command ``xray``."""

from __future__ import annotations

import json

from halfstep.cli.commands import Xray
from halfstep.diagnostics.xray import xray


def run(arguments: Xray) -> int:
    """Print what the bits of a checkpoint prove; 1 if that is a fault or a warning."""
    result = xray(arguments.folder, arguments.base or None)
    rows = len(result.moved) if arguments.all else 20
    print(json.dumps(result.as_json()) if arguments.json else result.text(rows))
    return int(result.found)
