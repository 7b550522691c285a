"""``halfstep.check_script``: each rule finds its mistake, alone, and is silent otherwise."""

import ast
from pathlib import Path

import pytest

import halfstep
from halfstep.diagnostics.scripts.rules import RULES, Rule, check_script
from halfstep.diagnostics.scripts.syntax import Script
from halfstep.errors import DataError

HEAD = """
import torch
scaler = torch.amp.GradScaler("cuda")
def train(model, optimizer, data, amp=True):
    for x in data:
"""
BY_NAME = {rule.name: rule for rule in RULES}


def lines(rule: Rule, text: str) -> list[int]:
    return list(rule.find(Script(text)))


def found(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(text)
    return [finding.rule for finding in check_script(path)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_has_a_script_with_and_one_without(tmp_path, rule):
    assert found(tmp_path, rule.bad) == [rule.name]
    assert found(tmp_path, rule.good) == []
    assert rule.what
    assert rule.why
    assert rule.instead


def test_names_are_one_each():
    assert len(BY_NAME) == len(RULES)


def test_a_finding_says_where_what_why_and_what_to_write(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(BY_NAME["clip-before-unscale"].bad)
    (finding,) = halfstep.check_script(str(path))
    assert isinstance(finding, halfstep.Finding)
    assert "clip_grad_norm_" in path.read_text().splitlines()[finding.line - 1]
    assert str(finding).startswith(f"{path}:{finding.line}: clip-before-unscale: gradients are")
    assert "Write: scaler.unscale_(optimizer)" in str(finding)


def body(text: str) -> str:
    return HEAD + "".join(f"        {line}\n" for line in text.strip().splitlines())


# Loops that public scripts have, and whether they clip scaled gradients.
CLIPS = [
    # the other branch is the one with a scaler
    ("""
if amp:
    scaler.scale(model(x)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
else:
    model(x).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""", 0),
    ("""
if not amp:
    model(x).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    continue
scaler.scale(model(x)).backward()
scaler.step(optimizer)
scaler.update()
""", 0),
    ("""
scaler.scale(model(x)).backward()
if amp:
    scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
""", 0),
    # as torch's own examples had it: in both branches, and unscaled in none
    ("""
if amp:
    scaler.scale(model(x)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
else:
    model(x).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""", 1),
    # unscaled too late
    ("""
scaler.scale(model(x)).backward()
torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""", 1),
    ("""
match amp:
    case True:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
    case _:
        model(x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
""", 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "count"), CLIPS)
def test_clipping_in_branches(tmp_path, text, count):
    assert found(tmp_path, body(text)) == ["clip-before-unscale"] * count


def test_a_scaler_is_known_as_attribute_and_as_parameter(tmp_path):
    attribute = """
import torch
class Trainer:
    def __init__(self, amp):
        self.scaler = torch.cuda.amp.GradScaler() if amp else None
    def step(self, loss):
        self.scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
    assert found(tmp_path, attribute) == ["clip-before-unscale"]
    parameter = "def step(scaler, loss):\n" + attribute.split("def step(self, loss):\n")[1].replace(
        "self.", ""
    )
    assert found(tmp_path, parameter) == ["clip-before-unscale"]


def test_a_scaler_that_leaves_the_file_is_not_judged_by_what_is_missing(tmp_path):
    for name in ("scaler-not-saved", "scaler-never-updated", "scaled-step"):
        text = BY_NAME[name].bad + "hand_over(scaler)\n"
        assert name not in found(tmp_path, text)
    text = BY_NAME["scaler-not-saved"].bad + "def get():\n    return scaler\n"
    assert found(tmp_path, text) == []


def test_a_scaler_that_is_off_is_none(tmp_path):
    text = BY_NAME["scaler-not-saved"].bad.replace(
        'GradScaler("cuda")', "GradScaler(enabled=False)"
    )
    assert "scaler-not-saved" not in found(tmp_path, text)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("half-weights-under-a-scaler", "x = x.half()"),  # an input
        ("pure-bf16", "frozen = Net().bfloat16()"),  # not trained
        ("pure-bf16", "model.bfloat16()"),  # after the optimizer was made: no gradient step
        ("sum-in-16-bits", "total += 1"),
        ("average-in-16-bits", "torch.save({'ema': copy.deepcopy(ema).half()}, 'x')"),
        ("backward-inside-autocast", "with accelerator.autocast():\n    loss.backward()"),
        ("backward-inside-autocast",
         "with torch.autocast('cuda', enabled=False):\n    loss.backward()"),
        ("positions-in-16-bits", "cos = angles.cos().to(torch.bfloat16)"),
        ("fp16-without-scaler",
         "def test():\n    with torch.autocast('cuda', dtype=torch.float16):\n        model(x)"),
    ],
)  # fmt: skip
def test_what_looks_alike_is_not_told(rule, text):
    made = "import torch\nmodel = Net()\noptimizer = torch.optim.AdamW(model.parameters())\n"
    assert lines(BY_NAME[rule], made + text + "\n") == []


@pytest.mark.parametrize(
    "made",
    [
        "model = Net().half()",
        "model = Net()\nmodel.half()",
        "model = Net().to('cuda', torch.float16)",
        "model = Net.from_pretrained('x', torch_dtype=torch.float16)",
        "model = Net()\nmodel.to(dtype=torch.half)",
    ],
)
def test_ways_to_make_a_model_fp16(made):
    text = f"{made}\noptimizer = torch.optim.Adam(model.parameters())\n"
    assert len(lines(BY_NAME["eps-underflows"], text)) == 1
    guarded = f"{text}model = get_peft_model(model)\nscaler.step(optimizer)\n"
    assert lines(BY_NAME["half-weights-under-a-scaler"], guarded) == []


def test_names_of_contexts_are_followed(tmp_path):
    text = (
        "import torch\nfrom contextlib import nullcontext\n"
        "ctx = nullcontext() if cpu else torch.amp.autocast('cuda', dtype=torch.bfloat16)\n"
        "with ctx:\n    loss = model(x)\n    loss.backward()\n"
    )
    assert found(tmp_path, text) == ["backward-inside-autocast"]


def test_a_script_is_never_run(tmp_path):
    witness = tmp_path / "ran"
    text = f"open({str(witness)!r}, 'w')\nraise SystemExit\n" + BY_NAME["pure-bf16"].bad
    assert found(tmp_path, text) == ["pure-bf16"]
    assert not witness.exists()


@pytest.mark.parametrize(
    "content", [b"def (", b"\xff\xfe\x00", b"print 1", b"x = 1\n\x00", b"(" * 20000]
)
def test_what_is_no_python_is_refused(tmp_path, content):
    path = tmp_path / "x.py"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.py: cannot be read as Python"):
        check_script(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pass\n",
        "async def f():\n    async with a as b:\n        pass\n",
        "lambda: (yield)\n",
        "def f(*, scaler=None):\n    try:\n        pass\n    except* E:\n        pass\n",
    ],
)
def test_any_python_is_read(tmp_path, text):
    assert found(tmp_path, text) == []


def test_there_is_no_file(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        check_script(tmp_path / "none.py")


HERE = Path(__file__).parents[2]
OURS = [*(HERE / "examples").glob("*.py"), *(HERE / "tests/strangers/scripts").glob("*.py")]


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_programs_that_are_right_are_left_alone(path):
    """halfstep's own examples, and classic scripts of pytorch/examples and others."""
    assert check_script(path) == []


def test_every_statement_kind_is_walked():
    """A call inside of any kind of statement is seen."""
    text = """
import torch
def f():
    with a:
        pass
    for i in g():
        h()
    else:
        j()
    while k():
        pass
    if l():
        m()
    elif n():
        o()
    try:
        p()
    except E:
        q()
    finally:
        r()
    match s():
        case 1:
            t()
    x = u() if v() else w()
    return y()
class C:
    z = z1()
    @deco()
    def method(self, default=dd()): aa()
"""
    script = Script(text)
    wanted = {
        ast.unparse(node.func) for node in ast.walk(script.tree) if isinstance(node, ast.Call)
    }
    assert {call.name for call in script.calls} >= wanted - {"deco", "dd"}


def test_a_script_is_read_in_its_own_encoding(tmp_path):
    path = tmp_path / "train.py"
    bad = RULES[0].bad
    path.write_bytes(b"\xef\xbb\xbf" + bad.encode())  # as editors on Windows write it
    assert [finding.rule for finding in check_script(path)] == [RULES[0].name]
    path.write_bytes(("# -*- coding: latin-1 -*-\n# caf\xe9\n" + bad).encode("latin-1"))
    assert [finding.rule for finding in check_script(path)] == [RULES[0].name]


@pytest.mark.parametrize(
    ("name", "content"),
    [("train.ipynb", b'{"cells": []}'), ("nested.py", b"x = " + b"-" * 200_000 + b"1")],
)
def test_what_would_be_read_as_nothing_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)  # a notebook is an expression of Python, too
    with pytest.raises(DataError, match=rf"{name}.*Python"):
        check_script(tmp_path / name)
