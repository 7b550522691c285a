"""The command ``halfstep report``: one page about one or several runs."""

from __future__ import annotations

from pathlib import Path

from halfstep.cli.commands import Report
from halfstep.errors import ConfigError
from halfstep.report.page import make_report
from halfstep.report.record import read_run


def run(arguments: Report) -> int:
    """Read the runs, write the page, and print each run's verdict."""
    if not arguments.runs:
        raise ConfigError("halfstep report RUN [RUN ...]: give the folder of a run, or of several")
    folders = [Path(name) for name in arguments.runs]
    report = make_report([read_run(folder) for folder in folders], arguments.lang)
    default = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    path = report.write(Path(arguments.out) if arguments.out else default)
    for row in report.rows:
        print(f"{row.record.name}: {row.verdict}")
    if report.comparison:
        print("", *report.comparison.verdict, "", sep="\n")
    print(f"Written: {path}")
    return 0
