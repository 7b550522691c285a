"""What trains inside which engine: seen by this tier's tests, kept in a file, shown by two pages.

A test of an engine runs a program in one process and on ranks (:func:`launched`), compares them
(:func:`compared`), and holds what it saw to ``engines.json`` (:func:`held`). A cell is ``equal``,
or ``refused`` with the line that the refusal names, which another cell of the test has run. To
take what is seen for what is held, and then to write the tables of docs/engines::

    ENGINES=write python -m pytest -m strangers -W ignore tests/strangers/test_NAME.py
    PYTHONPATH=tests python -m strangers.engines
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from halfstep.errors import HalfstepError

TESTS = Path(__file__).parents[1]
DATA = Path(__file__).with_suffix(".json")
PAGES = {"en": TESTS.parent / "docs/engines.md", "zh": TESTS.parent / "docs/engines.zh.md"}
POLICIES = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-split", "bf16-master")
WORDS = {
    "en": {"engine": "engine", "equal": "equal", "refused": "refused", "": "not run"},
    "zh": {"engine": "引擎", "equal": "相同", "refused": "拒绝", "": "未运行"},
}
MARGIN = 4.0
"""Of two runs with other roundings one may have luck."""
STEPS, ROWS = 6, 8
Training = Mapping[str, Sequence[float]]
"""Lists of numbers by name, such as losses, norms of gradients and final weights."""


class Block(nn.Module):
    """What an engine is to shard; a number of rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 17), nn.Linear(17, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(7, 7))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x.float().sin()).square().mean()


def batches(count: int, rank: int, size: int) -> Iterator[Tensor]:
    """This rank's rows; the mean of all ranks' losses is that of one process."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(ROWS, 7, generator=draw)[rank::size]


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def weights(model: nn.Module) -> list[float]:
    """All of them, whoever holds them."""
    return torch.cat([whole(p.detach()).flatten().float() for p in model.parameters()]).tolist()


def tried(train: Callable[..., Training], *arguments: Any) -> Training | str:
    """What it gives, or what halfstep's refusal says."""
    try:
        return train(*arguments)
    except HalfstepError as error:
        return str(error)


def launched(program: str, ranks: int, *arguments: str) -> Any:
    """What a file of tests/strangers gives to :func:`tell`, on so many ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *(torchrun if ranks > 1 else ()), program, *arguments],
        cwd=TESTS / "strangers", env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:6000]
    return json.loads([line for line in done.stdout.splitlines() if line.startswith('{"')][-1])


def tell(found: Any) -> None:
    """Print it as JSON, on rank 0, and end the ranks."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if first:
        print("\n" + json.dumps(found))


def farthest(one: Training, other: Training) -> float:
    """The largest difference of two numbers, relative to the largest of their list."""
    assert one.keys() == other.keys()
    pairs = {name: zip(one[name], other[name], strict=True) for name in one}
    return max(max(abs(a - b) for a, b in pairs[name]) / max(map(abs, one[name])) for name in one)


def compared(
    ranks: Mapping[str, Training | str],
    alone: Mapping[str, Training | str],
    plain: Training,
    instead: Mapping[str, tuple[str, str]] | None = None,
) -> dict[str, str]:
    """The cell of each policy: equal where ranks are as near to one process as roundings allow.

    ``instead`` has, for a policy that is refused, the line that works, which the refusal must
    name, and the policy whose run had that line.
    """
    cells = {}
    for policy, training in ranks.items():
        one = alone[policy]
        if isinstance(training, str) or isinstance(one, str):
            line, run = (instead or {}).get(policy, ("", ""))
            told = str(training)
            assert line, f"{policy}: {told}"
            assert line in told, told
            assert not isinstance(ranks[run], str), ranks[run]
            cells[policy] = f"refused: {line}"
            continue
        apart, allowed = farthest(one, training), MARGIN * farthest(one, plain) + 1e-5
        assert apart <= allowed, f"{policy}: {apart:.2g} from one process, {allowed:.2g} allowed"
        cells[policy] = "equal"
    return cells


def held(engine: str, version: str, cells: Mapping[str, str]) -> None:
    """Require that the file says what was seen of an engine, or write it there if asked."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))
    if os.environ.get("ENGINES") == "write":
        rows[engine] = {"version": version, **cells}
        lines = (f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows))
        DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    assert {name: rows[engine].get(name) for name in cells} == cells


def table(language: str) -> str:
    """Of all engines and policies, with the lines that work where one is refused."""
    words, instead = WORDS[language], list[str]()
    lines = [f"| {words['engine']} | {' | '.join(f'`{p}`' for p in POLICIES)} |", "|---" * 6 + "|"]
    for name, row in json.loads(DATA.read_text(encoding="utf-8")).items():
        cells = []
        for policy in POLICIES:
            kind, _, line = row.get(policy, "").partition(": ")
            if line and line not in instead:
                instead.append(line)
            cells.append(words[kind] + (f" ({instead.index(line) + 1})" if line else ""))
        lines.append(f"| {name} ({row['version']}) | {' | '.join(cells)} |")
    notes = [f"{number}. `{line}`" for number, line in enumerate(instead, 1)]
    return "\n".join([*lines, "", *notes]).strip()


def written(language: str) -> str:
    """The page as it is, with the table of now between its two marks."""
    marked = re.compile(r"(<!-- engines -->\n).*?(\n<!-- /engines -->)", re.S)
    page = PAGES[language].read_text(encoding="utf-8")
    return marked.sub(lambda found: f"{found[1]}\n{table(language)}\n{found[2]}", page)


if __name__ == "__main__":
    for one, page in PAGES.items():
        page.write_text(written(one), encoding="utf-8")
