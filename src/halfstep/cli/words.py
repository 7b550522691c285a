"""The phrases of the commands, from words.toml, in the language that was asked for."""

from __future__ import annotations

from halfstep.words import Told

told = Told("halfstep.cli")
