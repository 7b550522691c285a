"""Small classification runs: texts with a clear label, files of them, and a tiny random BERT."""

from __future__ import annotations

import csv
import random

from tests.trainer.models.pretrained_folders import save_classifier, save_tokenizer
from tests.trainer.runs import metrics, start

from halfstep.trainer.checkpoint import list_checkpoints, load_checkpoint
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.tasks import Use
from halfstep.trainer.loop import train
from halfstep.trainer.run import finish_run, run_config
from halfstep.trainer.tasks.classify import TrainedClassifier

TELLING = {
    "joy": ("glad", "happy", "sun", "smile"),
    "sad": ("rain", "tears", "lost", "grey"),
    "怒": ("气", "火", "骂", "恨"),
}
FILLING = ("the", "day", "was", "a", "bit", "and", "so", "we", "went", "home")


def rows(count, seed, most=14, weights=(4, 2, 1)):
    """(text, label) pairs of 3 to ``most`` + 1 words; classes as frequent as the weights say."""
    drawn = random.Random(seed)
    found = [(f"{words[0]} the", name) for name, words in TELLING.items()]  # each class occurs
    while len(found) < count:
        (name,) = drawn.choices(list(TELLING), weights)
        words = [
            drawn.choice(FILLING if drawn.random() < 0.7 else TELLING[name])
            for _ in range(drawn.randint(2, most))
        ]
        found.append((" ".join([*words, drawn.choice(TELLING[name])]), name))
    return found[:count]


def write_csv(path, pairs):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *pairs])
    return path


def write_files(folder, train=200, dev=41):
    """Paths of a training and a validation file."""
    folder.mkdir(parents=True, exist_ok=True)
    return (
        write_csv(folder / "train.csv", rows(train, seed=1)),
        write_csv(folder / "dev.csv", rows(dev, seed=2)),
    )


def write_bert(folder, **changes):
    """A tiny random BERT without a trained head, and a tokenizer that knows all words."""
    words = [*FILLING, *(word for some in TELLING.values() for word in some)]
    return save_tokenizer(save_classifier(folder, **changes), words=words)


def classify_config(files, *, shipped="classify-scratch", **overrides):
    """The configuration of a run that takes a second; ``__`` stands for a dot in keys."""
    train_file, dev_file = files
    values = {
        "precision": "fp32",
        "data.train": [str(train_file)],
        "data.dev": [str(dev_file)],
        "model.source": "scratch:tiny",
        "run.max_steps": 8,
        "run.batch_size": 24,
        "run.eval_every": 4,
        "run.device": "cpu",
        "schedule.warmup_steps": 2,
    }
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(shipped, [(k, v) for k, v in values.items() if v is not None])


def opened(folder, precision="fp32"):
    """The trained classifier of a run's folder."""
    use = Use(run="", device="cpu", precision=precision)
    return TrainedClassifier(folder, run_config(folder)).open(use)


def whole_run(config, path):
    """Session and ticks of a run to its end, its model included."""
    session, folder = start(config, path)
    ticks = list(train(session, path))
    finish_run(session, path)
    folder.close()
    return session, ticks


def column(path, key):
    return [line[key] for line in metrics(path) if key in line]


def checkpoint_steps(path):
    return [int(p.name.removeprefix("step-")) for p in list_checkpoints(path / "checkpoints")]


def checkpoint_of(path, step=None):
    """The checkpoint of a step; the newest without one."""
    found = list_checkpoints(path / "checkpoints")
    wanted = [p for p in found if step in (None, int(p.name.removeprefix("step-")))]
    return load_checkpoint(wanted[-1])
