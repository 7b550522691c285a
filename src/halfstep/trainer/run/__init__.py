"""The folder of a run: what it holds, how it is written, and how a run goes on from it."""
