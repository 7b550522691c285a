"""Mixed faults that runs survive unattended: ``make test-faults FAULTS=200``; an hour and more.

Small runs on 1 and 2 ranks are hurt again and again, at seeded steps: a rank is killed or stopped,
its disk is full or fails, the newest checkpoint or a weight in memory gets another bit. Each run
must end by itself in the very weights and moments of the run that nothing has happened to.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.cli.ranks import Run, alive, ranks, steps_of, tiny

from halfstep.files import write_whole
from halfstep.trainer.checkpoint import list_checkpoints, load_checkpoint

STEPS, SAVE, EACH = 240, 10, 5
ALONE = ("kill", "no space", "EIO", "flipped checkpoint")  # one rank has nobody to miss it
KINDS = (*ALONE, "stop", "flipped weight")

# Python runs it in every process before its program. What is to happen to a rank, and how often, is
# in a file of its own, which is gone when it has happened.
HURT = """
import errno, os, random, time
from pathlib import Path
if "RANK" in os.environ:
    from halfstep import files
    from halfstep.precision.step import Precision
    files._WAITS = (0.01, 0.02, 0.05)
    opened, stepped = files.LocalFileSystem.open, Precision.step
    def happens(kind):
        file = Path(os.environ["FAULTS"], f"{kind}-{os.environ['RANK']}")
        if not file.exists():
            return False
        left = int(file.read_text()) - 1
        file.write_text(str(left)) if left else file.unlink()
        return True
    def open_(self, path, mode="rb", **more):
        for kind, code in (("no space", errno.ENOSPC), ("EIO", errno.EIO)):
            if mode == "wb" and happens(kind):
                raise OSError(code, os.strerror(code))
        return opened(self, path, mode, **more)
    def step(self, *given, **more):
        time.sleep(0.005)
        if happens("flipped weight"):
            named = [*self.named_parameters().values()]
            bits = random.choice(named).detach().view(-1).view(dtype=__import__("torch").int32)
            bits[random.randrange(len(bits))] ^= 1 << random.randrange(31)
        return stepped(self, *given, **more)
    files.LocalFileSystem.open, Precision.step = open_, step
"""


def digest(*folders: Path) -> str:
    """SHA-256 of the newest checkpoint's weights and moments."""
    found, sha = load_checkpoint(list_checkpoints(*folders)[-1]), hashlib.sha256()
    for name, tensor in sorted((found.weights | found.optimizer).items()):
        sha.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return f"step {found.state['step']}, {sha.hexdigest()}"


def until(happens: Callable[[], bool], run: Run) -> None:
    """Wait while the run lives."""
    end = time.monotonic() + 300
    while not happens() and run.process.poll() is None:
        assert time.monotonic() < end, "the run does not come so far"
        time.sleep(0.01)


def hurt(run: Run, kind: str, chance: random.Random, control: Path, folders: list[Path]) -> None:
    """Let one thing happen to one rank, and wait until it has."""
    now = run.ranks()
    rank = chance.choice([*now])
    if kind in ("no space", "EIO", "flipped weight"):
        # passes with the retries, fails in the first folder, or in both
        times = 1 if kind == "flipped weight" else chance.choice((1, 3, 4, 8))
        due = control / f"{kind}-{rank}"
        write_whole(due, str(times))
        until(lambda: not due.exists(), run)
        return
    for pid in now.values() if kind == "flipped checkpoint" else ():
        os.kill(pid, signal.SIGSTOP)
    if kind == "flipped checkpoint":
        file = chance.choice(sorted(list_checkpoints(*folders)[-1].iterdir()))
        content = bytearray(file.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
    os.kill(now[rank], signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    until(lambda: not any(map(alive, now.values())), run)


def words_of(path: Path, corpus: Path) -> list[object]:
    """The run's command."""
    return [*tiny(corpus, path, steps=STEPS, save=SAVE), "--keep", 3, "--run.rank_timeout", 20,
            "--second-dir", path / "second", "--quiet"]  # fmt: skip


def survive(path: Path, corpus: Path, size: int, chance: random.Random) -> tuple[list[str], str]:
    """A run on so many ranks with a few faults: those that happened, and what it came to."""
    happened: list[str] = []
    folders, control = [path / "checkpoints", path / "second"], Path(tempfile.mkdtemp())
    (control / "sitecustomize.py").write_text(HURT)
    search = os.pathsep.join([str(control), *sys.path])
    words = [*words_of(path, corpus), "--save-deadline", chance.choice((0, 600))]
    run = Run(["--nproc", size, *words, "--", "--max-restarts", 99],
              PYTHONPATH=search, FAULTS=str(control))  # fmt: skip
    try:
        for number in range(EACH):
            kind = chance.choice(KINDS if size > 1 else ALONE)
            goal = STEPS * number // EACH + chance.randrange(30)
            enough = 2 if kind == "flipped checkpoint" else 0
            until(lambda: steps_of(path) >= goal and len(run.ranks()) == size  # noqa: B023
                  and len(list_checkpoints(*folders)) >= enough, run)  # noqa: B023  # fmt: skip
            if run.process.poll() is None:
                hurt(run, kind, chance, control, folders)
                happened.append(kind)
        code, _, err = run.end()
        return happened, digest(*folders) if code == 0 else f"code {code}: {err[-3000:]}"
    except AssertionError as error:
        for pid in (*run.ranks().values(), run.process.pid):
            os.kill(pid, signal.SIGKILL)
        return happened, f"{error}: {run.end()[2][-3000:]}"


def main() -> int:
    """Run with as many faults as are asked for, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance, counts, lost = random.Random(given.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.txt")
        corpus.write_text("".join(chance.choices("abcdefgh \n", k=20_000)))
        whole = {}
        for size in (1, 2):
            ranks(["--nproc", size, *words_of(Path(folder, f"whole-{size}"), corpus)])
            whole[size] = digest(Path(folder, f"whole-{size}", "checkpoints"))
        for number in itertools.count():
            size = chance.choice((1, 2, 2))
            begin = time.monotonic()
            happened, found = survive(Path(folder, str(number)), corpus, size, chance)
            counts.update(happened)
            lost += found != whole[size]
            told = "as if nothing had happened" if found == whole[size] else f"LOST: {found}"
            print(f"{counts.total()} faults: {size} ranks, {', '.join(happened)}: {told} "
                  f"({time.monotonic() - begin:.0f} s)", flush=True)  # fmt: skip
            if counts.total() >= given.faults:
                break
    print(f"{dict(counts)}; {number + 1} runs, {lost} lost")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
