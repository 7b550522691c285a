"""A command on ranks that stand already, as if a launcher had started it there."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest

from halfstep.cli import train
from halfstep.cli.main import main
from halfstep.distributed.world import World


class Pooled(World):
    """Ranks whose process group outlives the command."""

    def close(self):
        pass


def command(rank, words):
    """Exit code, stdout and stderr of a command on this rank."""
    out, err = io.StringIO(), io.StringIO()
    world = Pooled.around_group()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world.size))
        patch.setattr(train, "open_world", lambda *_, **__: world)
        patch.setattr(train, "keep_freed_memory", lambda **_: None)
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def on_ranks(pool, *words):
    """What the command gives on each rank of a pool."""
    return pool.run(command, words=[*map(str, words)])
