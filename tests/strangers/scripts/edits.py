"""What a user changes in each script to train it under halfstep, as pairs of old and new text.

Every old text stands exactly once in its script. ``policy`` in a new text is what a user would
write there as a string.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Edit = tuple[str, str]


@dataclass(frozen=True)
class Script:
    """A program and its edits.

    Attributes:
        module: Its file's name.
        edits: For any policy.
        own: For policies that need one of halfstep's optimizers, after ``edits``; empty where
            halfstep has none of that kind.
        watch: Not counted: they hand what is trained to ``prepare``, for control runs.
    """

    module: str
    edits: tuple[Edit, ...]
    own: tuple[Edit, ...]
    watch: tuple[Edit, ...]

    @property
    def source(self) -> str:
        return (Path(__file__).parent / f"{self.module}.py").read_text(encoding="utf-8")

    def edited(self, own: bool = False) -> str:
        return apply(self.source, (*self.edits, *(self.own if own else ())))

    def lines_changed(self, own: bool = False) -> tuple[int, int]:
        """Lines that were added and taken out, as ``diff`` counts them."""
        lines = difflib.unified_diff(self.source.splitlines(), self.edited(own).splitlines(), n=0)
        signs = [line[0] for line in lines if not line.startswith(("---", "+++", "@@"))]
        return signs.count("+"), signs.count("-")


def apply(text: str, edits: Sequence[Edit]) -> str:
    for old, new in edits:
        count = text.count(old)
        assert count == 1, f"stands {count} times where it should stand once:\n{old}"
        text = text.replace(old, new)
    return text


NANOGPT = Script(
    "nanogpt",
    (
        ("import torch\nfrom", "import halfstep\nimport torch\nfrom"),
        (
            """\
    if init_from == "resume":
        optimizer.load_state_dict(checkpoint["optimizer"])
""",
            """\
    precision = halfstep.Precision(policy, model, optimizer)
    if init_from == "resume":
        optimizer.load_state_dict(checkpoint["optimizer"])
        precision.load_state_dict(checkpoint["precision"])
""",
        ),
        (
            "                _, loss = model(X, Y)\n                losses",
            "                with precision.autocast():\n"
            "                    _, loss = model(X, Y)\n                losses",
        ),
        (
            '                        "optimizer": optimizer.state_dict(),\n',
            '                        "optimizer": optimizer.state_dict(),\n'
            '                        "precision": precision.state_dict(),\n',
        ),
        (
            """\
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
""",
            """\
            with precision.autocast():
                _, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
""",
        ),
        ("            loss.backward()", "            precision.backward(loss)"),
        (
            "        optimizer.step()\n        optimizer.zero_grad(set_to_none=True)\n",
            "        precision.step()\n",
        ),
        (
            "    print(model.generate(",
            "    with precision.autocast():\n        print(model.generate(",
        ),
    ),
    (("return torch.optim.AdamW(", "return halfstep.optim.AdamW("),),
    (
        (
            '    if init_from == "scratch":\n        model = GPT(GPTConfig(**model_args))\n',
            '    if init_from == "scratch":\n        model = GPT(GPTConfig(**model_args))\n'
            "        prepare(model)\n",
        ),
        (
            '        model.load_state_dict(checkpoint["model"])\n',
            '        prepare(model)\n        model.load_state_dict(checkpoint["model"])\n',
        ),
    ),
)

SCRIPTS = {
    "nanogpt": NANOGPT,
}
