"""What is delivered is what was trained, and stays so: every door, and every byte afterwards.

A door is a way by which a model leaves a run: the ``model/`` of its end, and an exported GPT.
"""

from __future__ import annotations

import random
import shutil

import peft
import pytest
import torch
import transformers
from tests.trainer.classifiers import (
    classify_config,
    opened as opened_classifier,
    whole_run as run,
    write_files,
)
from tests.trainer.lm_folders import POSITIONS, alpaca, opened, save_base, write
from tests.trainer.runs import small_config

from halfstep.errors import CheckpointError
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.tasks import Exporting
from halfstep.trainer.models.causal_lm import open_causal_lm
from halfstep.trainer.run import finish_run, run_config
from halfstep.trainer.tasks.text import TrainedText

pytestmark = pytest.mark.covering


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


def lm_config(place, kind, **changes):
    """Three steps of a language model whose base is untied, unless it is GPT-2."""
    base, data = place / kind, place / "x.jsonl"
    if not base.exists():
        save_base(base, kind)
        write(data, alpaca(24))
    values = {
        "precision": "fp32", "model.source": str(base), "data.train": [str(data)],
        "data.max_length": POSITIONS, "optimizer.learning_rate": 1e-2, "run.max_steps": 3,
        "run.batch_size": 6, "run.device": "cpu",
    }  # fmt: skip
    return load_config("lm-lora", list((values | changes).items()))


@pytest.fixture(scope="module")
def sessions(place):
    """Name of a door to its ended session; the folder of the run is named so too."""
    text = place / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    targets = {"model.lora_targets": ["q_proj", "o_proj", "embed_tokens"]}
    configs = {
        "adapter": lm_config(place, "Llama", **targets),
        "whole": lm_config(place, "GPT2", **{"model.lora_r": 0}),
        "classifier": classify_config(write_files(place, 40, 10), run__max_steps=2),
        "gpt": small_config(text, "fp32"),
    }
    return {name: run(config, place / name)[0] for name, config in configs.items()}


def export(path, target):
    use = Exporting(run=str(path), to="hf", output=str(target))
    return TrainedText(path, run_config(path)).export(use)


# Faults: a file that is not what was trained.

FAULTS = {
    "dropped": lambda t: 0 * t,
    "doubled": lambda t: 2 * t,
    "transposed": lambda t: t.T if t.dim() == 2 and t.shape[0] == t.shape[1] else t,
}


@pytest.mark.parametrize("name", ["adapter", "whole", "classifier"])
def test_a_wrong_file_is_not_left_by_a_run(name, sessions, place, monkeypatch):
    """Nor does it replace what the run left before."""
    owner = peft.PeftModel if name == "adapter" else transformers.PreTrainedModel
    real, folder = owner.save_pretrained, place / name / "model"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def refused(change):
        def save(self, path, state_dict=None, **options):
            key = next(n for n, t in state_dict.items() if t.dim() == 2)
            changed = change(state_dict[key].clone()).contiguous()
            real(self, path, state_dict=state_dict | {key: changed}, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, "save_pretrained", save)
            with pytest.raises(CheckpointError, match="not what was trained"):
                finish_run(sessions[name], place / name)
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before

    for change in (*FAULTS.values(), lambda t: t.flip(0)):
        refused(lambda t, by=change: by(t) if not torch.equal(by(t), t) else t + 1)


# Hashes.


@pytest.fixture(scope="module")
def folders(sessions, place):
    """Every kind of delivered folder, and what opens it."""
    export(place / "gpt", place / "gpt exported")
    return {
        "adapter": lambda: opened(place / "adapter"),
        "whole": lambda: opened(place / "whole"),
        "classifier": lambda: opened_classifier(place / "classifier"),
        "gpt exported": lambda: open_causal_lm(place / "gpt exported"),
    }


def damaged(file, drawn):
    """Ways to change a file: one bit, a block of zeros, a cut, no file."""
    whole, at = file.read_bytes(), drawn.randrange(file.stat().st_size)
    yield whole[:at] + bytes([whole[at] ^ 1 << drawn.randrange(8)]) + whole[at + 1 :]
    block = whole[:at] + bytes(len(whole[at : at + 4096])) + whole[at + 4096 :]
    yield block if block != whole else whole + b"\0"
    yield whole[:at]
    yield None


@pytest.mark.parametrize(
    "name",
    ["adapter", "whole", "classifier", "gpt exported"],
)
def test_every_damage_is_found_and_named(name, folders, place):
    folder = place / name if name.endswith("exported") else place / name / "model"
    folders[name]()
    drawn, seen = random.Random(name), set()
    for file in sorted(folder.iterdir()):
        kept = file.read_bytes()
        for content in (c for _ in range(4) for c in damaged(file, drawn)):
            file.unlink() if content is None else file.write_bytes(content)
            if file.name == "manifest.json" and content is None:
                folders[name]()  # as a folder of another program
            else:
                with pytest.raises(CheckpointError) as caught:
                    folders[name]()
                words = str(caught.value)
                assert file.name in words
                assert "copy it again" in words
            file.write_bytes(kept)
        seen.add(file.suffix)
    assert seen >= {".json", ".safetensors"}
    folders[name]()


def test_a_link_to_an_intact_file_is_one(folders, place, tmp_path):
    """As in the cache of the hub."""
    source = place / "gpt exported"
    shutil.copytree(source, tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in source.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(tmp_path / "blobs" / file.name)
    open_causal_lm(tmp_path / "snapshot")
    (tmp_path / "blobs" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"snapshot/config\.json has changed"):
        open_causal_lm(tmp_path / "snapshot")


def test_another_tokenizer_in_a_run_is_refused(sessions, place, tmp_path):
    shutil.copytree(place / "gpt", tmp_path / "gpt")
    file = tmp_path / "gpt" / "tokenizer" / "tokenizer_config.json"
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="is not the tokenizer of the run"):
        export(tmp_path / "gpt", tmp_path / "o")
