"""The phrases of precision, from words.toml, in the language spoken."""

from __future__ import annotations

from halfstep.words import Told

told = Told("halfstep.precision")
