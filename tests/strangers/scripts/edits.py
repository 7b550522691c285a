"""What a user changes in each script to train it under halfstep, as pairs of old and new text.

Every old text stands exactly once in its script. ``policy`` in a new text is what a user would
write there as a string. ``tests/golden/programs.py`` trains what comes out.
"""

from __future__ import annotations

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
    """

    module: str
    edits: tuple[Edit, ...]
    own: tuple[Edit, ...]

    @property
    def source(self) -> str:
        return (Path(__file__).parent / f"{self.module}.py").read_text(encoding="utf-8")

    def edited(self, own: bool = False) -> str:
        return apply(self.source, (*self.edits, *(self.own if own else ())))


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
)

SCRIPTS = {
    "nanogpt": NANOGPT,
}
