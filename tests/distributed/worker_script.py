"""A rank that uses World as the trainer does, under the real command line.

``python worker_script.py train --nproc 2 ... -- ...`` is the launcher, whose ranks are this script
again; a stand-in for ``halfstep train`` does what HALFSTEP_TEST_JOB names.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import types
from pathlib import Path

from halfstep.cli import main as program
from halfstep.distributed.world import World, open_world
from halfstep.errors import ConfigError, NonFiniteError
from halfstep.trainer.loop import Interrupt

STEPS = int(os.environ.get("HALFSTEP_TEST_STEPS", "20"))
FOLDER = Path(os.environ["HALFSTEP_TEST_FOLDER"])
JOB = os.environ.get("HALFSTEP_TEST_JOB", "")


def run(arguments: argparse.Namespace) -> int:
    (FOLDER / f"pid{os.environ.get('RANK', '')}").write_text(str(os.getpid()))
    with open_world("cpu", timeout_seconds=30) as world:
        return train(world)


def train(world: World) -> int:
    name = world.remember("folder", f"run-of-attempt-{world.attempt}")
    state = FOLDER / f"{name}.state"
    step = int(world.share(state.read_text() if world.is_main and state.exists() else "0"))
    first = step
    with Interrupt() as interrupt:
        while step < STEPS:
            step += 1
            fail(world, step)
            time.sleep(0.02)
            stop = bool(world.largest(int(bool(interrupt.requested))))
            world.main_only(lambda now=step: save(state, now))
            note(world.rank, world.attempt, step)
            if stop:
                if world.is_main:
                    print(f"SAVED step={step}")
                return 4
    if world.is_main:
        print(f"DONE steps={step} first={first} attempt={world.attempt} run={name}")
    return 0


def fail(world: World, step: int) -> None:
    if step != 3 or world.attempt:
        return
    if JOB == "refuse rank 1" and world.rank == 1:
        raise ConfigError("no GPU on this rank")
    if JOB == "guard":
        raise NonFiniteError("step 3: the loss is NaN", cause="forward")
    if JOB == "crash rank 1" and world.rank == 1:
        raise ValueError("this one")
    if JOB == "exit rank 1" and world.rank == 1:
        os._exit(7)
    if JOB == "crash main_only":
        world.main_only(lambda: 1 / 0)


def save(state: Path, step: int) -> None:
    temporary = state.with_suffix(".tmp")
    temporary.write_text(str(step))
    os.replace(temporary, state)


def note(rank: int, attempt: int, step: int) -> None:
    with (FOLDER / f"steps{rank}").open("a") as file:
        file.write(f"{attempt} {step}\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        stand_in = types.ModuleType("halfstep.cli.train")
        stand_in.run = run
        sys.modules["halfstep.cli.train"] = stand_in
    else:
        from halfstep.cli import launch

        launch._PROGRAM = (__file__,)
    sys.exit(program.main())
