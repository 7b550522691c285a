"""Programs that nobody here wrote need packages that only ``make test-strangers`` installs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent / "packages"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Look into ``packages`` only where its marker is asked for: there a missing one is an error.

    A run that selects other tests, or all, must not need them; a folder or file of it that is
    named on the command line is collected as well.
    """
    wanted = config.getoption("markexpr") == "strangers"
    return True if collection_path == PACKAGES and not wanted else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was trained and refused, and how many lines a user changes for it."""
    rows = [
        json.loads(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "cells"
    ]
    if rows:
        terminalreporter.section("programs nobody here wrote")
        for line in table(rows):
            terminalreporter.write_line(line)


def table(rows: list[list]) -> list[str]:
    """One line a program: lines added and removed, cells trained, how near the bound, refusals.

    Lines are those of ``bf16-mixed``, and of ``bf16-split``, which needs an optimizer of halfstep.
    """
    lines = [f"{'program':46} {'mixed':>7} {'split':>7}  trained  worst  refused"]
    kinds: dict[str, int] = {}
    for package, name, cells in sorted(rows):
        counts = [f"+{cells[p][2]} -{cells[p][3]}" for p in ("bf16-mixed", "bf16-split")]
        trained = [float(seen) for kind, seen, *_ in cells.values() if kind == "trained"]
        refused = [policy.split(",init")[0] for policy in cells if cells[policy][0] == "refused"]
        for kind, *_ in cells.values():
            kinds[kind] = kinds.get(kind, 0) + 1
        lines.append(
            f"{package + ': ' + name:46} {counts[0]:>7} {counts[1]:>7}  "
            f"{len(trained):>3}/{len(cells):<3}  {max(trained, default=0.0):>5.2f}  "
            + ", ".join(refused)
        )
    total = sum(kinds.values())
    share = kinds.get("trained", 0) / total
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    lines.append(f"{total} cells: {found}; {share:.1%} trained. worst: of what the bound allows")
    return lines
