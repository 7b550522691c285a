"""The commands ``halfstep configs ls``, ``show`` and ``cp``."""

from __future__ import annotations

from pathlib import Path

from halfstep.cli.commands import CopyConfig, ListConfigs, ShowConfig
from halfstep.cli.help import summary_of
from halfstep.errors import ConfigError
from halfstep.trainer.config.config import config_to_toml, load_config, shipped_configs


def run(arguments: ListConfigs | ShowConfig | CopyConfig) -> int:
    """List, show or copy shipped configurations."""
    match arguments:
        case ListConfigs():
            shipped = shipped_configs()
            width = max(map(len, shipped))
            for name, text in shipped.items():
                print(f"{name:<{width}}  {summary_of(name, text)}")
        case ShowConfig(name=name):
            print(config_to_toml(load_config(name)).rstrip())
        case CopyConfig(name=name, path=path):
            print(_copy(name, Path(path)))
    return 0


def _copy(name: str, target: Path) -> Path:
    text = config_to_toml(load_config(name))
    text = shipped_configs().get(name, text)  # a shipped file is copied with its comments
    if target.is_dir():
        target = target / f"{Path(name).stem}.toml"
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{target} exists already; choose another path") from None
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error
    return target
