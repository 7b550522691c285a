"""The command ``compare``: where two recorded runs part."""

from __future__ import annotations

import json

from halfstep.cli.commands import Compare
from halfstep.diagnostics.records.compare import compare


def run(arguments: Compare) -> int:
    """Print what differs; 1 if something does by more than rounding explains."""
    found = compare(arguments.a, arguments.b, floor=arguments.floor)
    if arguments.json:
        print(json.dumps({"format": 1, "command": "compare", **found.as_json()}, indent=1))
    else:
        print(found)
    return int(found.found)
