"""The command line: the grammar, and one file per command."""
