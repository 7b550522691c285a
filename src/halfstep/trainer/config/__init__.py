"""The configuration of a run: frozen dataclasses, read from TOML and the command line."""
