"""The command ``compare``: where two recorded runs part."""

from __future__ import annotations

import json

from halfstep.cli.commands import Compare
from halfstep.diagnostics.records.compare import compare, distances
from halfstep.shown import aligned


def run(arguments: Compare) -> int:
    """Print what differs; 1 if something does by more than rounding explains."""
    found = compare(arguments.a, arguments.b, floor=arguments.floor)
    if arguments.json:
        print(json.dumps({"format": 1, "command": "compare", **found.as_json()}, indent=1))
    else:
        if arguments.all:
            head = ("module", "direction", "operation", "apart", "rounding explains")
            print(aligned([head, *distances(arguments.a, arguments.b)], {3, 4}), end="\n\n")
        print(found)
    return int(found.found)
