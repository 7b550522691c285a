"""``halfstep finetune lm`` and what is done with its run, as a user meets it."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.cli.ranks import (
    assert_refused,
    losses,
    ranks as run_ranks,
)
from tests.trainer.lm_folders import alpaca, chats, save_base, write

from halfstep.cli import train
from halfstep.cli.main import main

FINETUNE = [sys.executable, "-m", "halfstep", "finetune"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data and models."""
    folder = tmp_path_factory.mktemp("place")
    write(folder / "x.jsonl", alpaca(40))
    write(folder / "dev.jsonl", alpaca(9, seed=1))
    write(folder / "chat.jsonl", chats(12))
    save_base(folder / "llama", "Llama", torch.float16, bos=True, chat=True)
    save_base(folder / "gpt2", "GPT2")
    return folder


def words(place, path, model="llama", **changes):
    options = {
        "--train": place / "x.jsonl", "--dev": place / "dev.jsonl", "--model": place / model,
        "--max-length": 160, "--precision": "fp16-mixed", "--max-steps": 4, "--batch-size": 6,
        "--learning-rate": 1e-2, "--device": "cpu", "--output-dir": path,
    } | {f"--{k.replace('_', '-')}": v for k, v in changes.items()}  # fmt: skip
    return ["finetune", "lm", *(str(word) for pair in options.items() for word in pair)]


@pytest.fixture(scope="module")
def tuned(place, tmp_path_factory):
    """A LoRA run on an fp16 base."""
    path = tmp_path_factory.mktemp("run") / "r"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "keep_freed_memory", lambda **_: None)
        assert main([*words(place, path), "--quiet"]) == 0
    return path


def test_evaluate_prints_loss_perplexity_and_precision(tuned, place, halfstep):
    run = ["evaluate", "--run", tuned, "--device", "cpu", "--batch-size", "6"]
    last = json.loads((tuned / "metrics.jsonl").read_text().splitlines()[-1])
    code, out, err = halfstep(*run, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["loss"] == last["val_loss"]  # the same batches in the same precision
    assert found["precision"] == "fp16-mixed"
    other = json.loads(halfstep(*run, "--json", "--precision", "fp32")[1])
    assert other["precision"] == "fp32"
    # the fp16 base is held in fp32, and fp16 products are gone
    assert other["loss"] != found["loss"] == pytest.approx(other["loss"], rel=1e-3)
    elsewhere = json.loads(halfstep(*run, "--json", "--data", place / "dev.jsonl")[1])
    assert elsewhere == found
    chats_only = ["--data", place / "chat.jsonl"]
    whole = json.loads(halfstep(*run, "--json", *chats_only)[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "llama")
    contents = [m["content"] for r in chats(12) for m in r["messages"] if m["role"] == "assistant"]
    # every answer and the end of its turn
    assert whole["tokens"] == sum(len(tokenizer.tokenize(text)) + 1 for text in contents)
    one = halfstep(*run[:-1], "1", "--json", *chats_only, "--max-batches", "1")[1]
    assert 0 < json.loads(one)["tokens"] < whole["tokens"]
    text = halfstep(*run, *chats_only)[1]
    assert text.startswith("loss ")
    assert text.endswith(" tokens in fp16-mixed\n")


def test_a_run_that_has_not_ended_has_no_model(tuned, halfstep, tmp_path):
    for name in ("config.toml", "prompt.json"):
        (tmp_path / name).write_bytes((tuned / name).read_bytes())
    assert_refused(halfstep("evaluate", "--run", tmp_path), "has no model yet")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "lora", "precision"), [("llama", 8, "fp16-mixed"), ("gpt2", 0, "fp32")]
)
def test_two_ranks_are_two_micro_batches(model, lora, precision, place, halfstep, tmp_path):
    """Nine validation records in uneven batches: every one counts once.

    Without clipping, whose norm shards add in another order, the weights are the same bit for bit.
    """
    options = {"lora_r": lora, "precision": precision, "eval_every": 2}
    unclipped = ["--optimizer.max_norm", "0", "--quiet"]
    one = [*words(place, tmp_path / "one", model, **options), "--grad-accum", "2", *unclipped]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert halfstep(*one)[0] == 0
    finally:
        torch.set_num_threads(threads)
    for layout in ("data=2", "shard=2"):
        path = tmp_path / layout
        command = [*words(place, path, model, **options), *unclipped, "--parallel", layout]
        code, out, err = run_ranks([*command[1:], "--nproc", 2], command=FINETUNE)
        assert code == 0, err
        assert len(out.splitlines()) == 3  # the summary, the verdict, what is left
        a, b = losses(path), losses(tmp_path / "one")
        assert a[:4] == b[:4]
        # evaluation's batches are not cut alike: fp32, fp16 and bf16 sums over other shapes
        assert a == pytest.approx(b, rel=1e-4 if precision != "fp32" else 1e-6)
        file = "adapter_model.safetensors" if lora else "model.safetensors"
        mine, theirs = (load_file(p / "model" / file) for p in (path, tmp_path / "one"))
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]), name
        found = json.loads(halfstep("evaluate", "--run", path, "--json", "--device", "cpu")[1])
        assert found["loss"] == pytest.approx(a[-1], rel=1e-4)
