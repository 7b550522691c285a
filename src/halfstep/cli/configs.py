"""``halfstep configs``."""

from __future__ import annotations

import argparse
from pathlib import Path

from halfstep.cli.console import write_out
from halfstep.errors import ConfigError
from halfstep.trainer.config.config import config_to_toml, load_config, shipped_configs


def run(arguments: argparse.Namespace) -> int:
    """List, show or copy shipped configurations."""
    if arguments.action == "ls":
        for name, text in shipped_configs().items():
            write_out(f"{name:<14} {text.splitlines()[0].lstrip('# ')}")
        return 0
    config = load_config(arguments.name)
    if arguments.action == "show":
        write_out(config_to_toml(config).rstrip())
        return 0
    target = Path(arguments.path)
    if target.is_dir():
        target = target / f"{Path(arguments.name).stem}.toml"
    shipped = shipped_configs()
    text = shipped[arguments.name] if arguments.name in shipped else config_to_toml(config)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{target} exists already; choose another path") from None
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error
    write_out(str(target))
    return 0
