"""The Transformers Trainer with 16-bit weights that lose no update, and a log that shows it.

A small BERT with random bf16 weights learns which standard-library package a docstring comes from:
first with the Trainer's own optimizer, whose small updates round to nothing, then with halfstep's,
which keeps a 16-bit remainder beside each weight. Finally a batch produces a NaN, and the run
reports it and stops.

Run: python examples/transformers_trainer.py
"""

import ast
import re
import sysconfig
import tempfile
import zlib
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from halfstep import NonFiniteError
from halfstep.integrations.hf_trainer import attach
from halfstep.optim import AdamW

PACKAGES = ("asyncio", "email", "http", "logging", "tkinter", "xml")
WORDS, LENGTH, STEPS, RATE = 2048, 32, 60, 1e-3


def docstrings(package: str) -> list[str]:
    """Collect the docstrings of a package's modules, classes and functions."""
    found = []
    for path in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
        if "test" not in str(path.relative_to(sysconfig.get_path("stdlib"))):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    found.append(ast.get_docstring(node) or "")
    return [text for text in found if len(text) > 40]


def examples() -> list[dict[str, list[int] | int]]:
    """Turn a docstring into hashed words, their mask, and the package's number."""
    rows = []
    for label, package in enumerate(PACKAGES):
        for text in docstrings(package):
            words = re.findall(r"[a-z]+", text.lower())[:LENGTH]
            ids = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
            padding = LENGTH - len(ids)
            mask = [1] * len(ids) + [0] * padding
            rows.append({"input_ids": ids + [0] * padding, "attention_mask": mask, "labels": label})
    return rows


def model() -> BertForSequenceClassification:
    set_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=len(PACKAGES),
    )  # fmt: skip
    return BertForSequenceClassification(config).to(torch.bfloat16)


def trainer(data, folder: str, **options) -> Trainer:
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=16, learning_rate=RATE,
        logging_steps=20, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    return Trainer(model(), arguments, train_dataset=data, **options)


def main() -> dict[str, list[dict[str, float]]]:
    data = examples()
    ours = (AdamW, {"lr": RATE, "update": "split"})
    histories = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (("torch", {}), ("halfstep", {"optimizer_cls_and_kwargs": ours})):
            print(f"optimizer of {name}, bf16 weights")
            run = trainer(data, folder, **options)
            # without allow_pure, halfstep refuses to let the Trainer lose updates of 16-bit weights
            attach(run, lost_updates_every=20, allow_pure=name == "torch")
            run.train()
            histories[name] = [entry for entry in run.state.log_history if "loss" in entry]

        print("a model whose classifier has gone wrong")
        run = trainer(data, folder, optimizer_cls_and_kwargs=ours)
        attach(run)
        run.model.classifier.register_forward_hook(
            lambda _module, _inputs, out: out / 0 if run.state.global_step == 2 else None
        )
        try:
            run.train()
        except NonFiniteError as error:
            print(f"{type(error).__name__}: {error}")
    return histories


if __name__ == "__main__":
    main()
