"""What is delivered is what was trained, and stays so: every door, and every byte afterwards.

A door is a way by which a model leaves a run: the ``model/`` of its end, and an export.
"""

from __future__ import annotations

import copy
import random
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.trainer.classifiers import (
    classify_config,
    opened as opened_classifier,
    whole_run as run,
    write_files,
)
from tests.trainer.lm_folders import POSITIONS, alpaca, opened, save_base, write
from tests.trainer.runs import small_config

import halfstep.trainer.models.causal_lm as causal_lm
from halfstep.errors import CheckpointError
from halfstep.trainer.config.config import load_config
from halfstep.trainer.config.tasks import Exporting
from halfstep.trainer.models.causal_lm import add_lora, open_causal_lm
from halfstep.trainer.models.pretrained import quiet
from halfstep.trainer.run import finish_run, run_config
from halfstep.trainer.tasks.lm import TrainedLM
from halfstep.trainer.tasks.text import TrainedText

pytestmark = pytest.mark.covering


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


def lm_config(place, kind, **changes):
    """Three steps of a language model whose base is untied, unless it is GPT-2."""
    base, data = place / kind, place / "x.jsonl"
    if not base.exists():
        save_base(base, kind, torch.bfloat16 if kind == "Qwen2" else torch.float32)
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
        "16 bits": lm_config(place, "Qwen2", **targets),
        "whole": lm_config(place, "GPT2", **{"model.lora_r": 0}),
        "classifier": classify_config(write_files(place, 40, 10), run__max_steps=2),
        "gpt": small_config(text, "fp32"),
    }
    return {name: run(config, place / name)[0] for name, config in configs.items()}


def export(path, target, dtype=""):
    config = run_config(path)
    kind = TrainedText if config.TASK == "pretrain" else TrainedLM
    use = Exporting(run=str(path), to="hf", output=str(target), dtype=dtype)
    return kind(path, config).export(use)


def logits(folder, ids, adapter=None):
    with quiet(), torch.no_grad():
        kind = peft.AutoPeftModelForCausalLM if adapter else transformers.AutoModelForCausalLM
        model = kind.from_pretrained(adapter or folder, dtype=torch.float32)
        return model.eval()(ids).logits


@pytest.mark.parametrize(("name", "kind"), [("adapter", "Llama"), ("16 bits", "Qwen2")])
def test_an_export_is_base_and_adapter(name, kind, sessions, place, tmp_path):
    """By peft and transformers alone; embeddings are merged too."""
    ids = torch.arange(32).view(2, 16)
    base, tuned = logits(place / kind, ids), logits(place / kind, ids, place / name / "model")
    # fp32 sums in another order; half an eps of weights, of logits near 1
    for dtype, atol in (("fp32", 1e-5), ("bf16", 0.02), ("fp16", 0.002)):
        export(place / name, tmp_path / dtype, dtype)
        found = logits(tmp_path / dtype, ids)
        torch.testing.assert_close(found, tuned, rtol=0, atol=atol)
        assert (base - tuned).abs().max() > 0.04 > atol
    table = load_file(tmp_path / "fp32/model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(
        table, load_file(place / kind / "model.safetensors")["model.embed_tokens.weight"].float()
    )


# Faults: a merge or a file that is not what was trained.

FAULTS = {
    "dropped": lambda t: 0 * t,
    "doubled": lambda t: 2 * t,
    "transposed": lambda t: t.T if t.dim() == 2 and t.shape[0] == t.shape[1] else t,
}


@pytest.mark.parametrize("kind", ["Linear", "Embedding"])
def test_a_wrong_merge_is_not_exported(kind, sessions, place, tmp_path, monkeypatch):
    layer = getattr(peft.tuners.lora, kind)
    real = layer.get_delta_weight
    for change in list(FAULTS.values())[: 3 if kind == "Linear" else 2]:  # no table is square
        monkeypatch.setattr(layer, "get_delta_weight", lambda *a, by=change: by(real(*a)))
        with pytest.raises(CheckpointError, match="the merged model is not the trained one"):
            export(place / "16 bits", tmp_path / "o")  # whose own rounding would hide much of it
    assert not any(tmp_path.iterdir())


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
    if name == "adapter":  # the right tensors with twice the scale
        settings = sessions[name].task.model.model.peft_config["default"]
        monkeypatch.setattr(settings, "lora_alpha", 2 * settings.lora_alpha)
        refused(lambda t: t)


def test_a_wrong_file_is_not_exported(sessions, place, tmp_path, monkeypatch):
    real = causal_lm.to_hf
    for change in FAULTS.values():

        def wrong(name, parameter, heads, by=change):
            found = real(name, parameter, heads)
            return by(found) if "layers.0.attn.proj.weight" in name else found

        monkeypatch.setattr(causal_lm, "to_hf", wrong)
        with pytest.raises(CheckpointError, match="the files are not the model"):
            export(place / "gpt", tmp_path / "o")
    assert not any(tmp_path.iterdir())


def test_a_format_that_loses_the_weights_is_refused(sessions, place, tmp_path, monkeypatch):
    """The same function with values 2^-18 times as large, which fp16 holds to a digit."""
    real = TrainedLM.load

    @torch.no_grad()
    def load(self):
        real(self)
        for layer in self.model.core.transformer.h:
            layer.attn.c_attn.weight[:, -32:] *= 2.0**-18
            layer.attn.c_attn.bias[-32:] *= 2.0**-18
            layer.attn.c_proj.weight.clamp_(-0.2, 0.2).mul_(2.0**18)  # within fp16

    monkeypatch.setattr(TrainedLM, "load", load)
    with pytest.raises(CheckpointError, match="fp16 cannot hold it"):
        export(place / "whole", tmp_path / "o", "fp16")
    export(place / "whole", tmp_path / "wide", "bf16")


# Targets.


def test_targets_that_cannot_be_merged_are_refused_first(tmp_path):
    for kind, targets, why in (
        ("GPT2", ["c_attn", "wte"], "'transformer.wte' could not be merged: another layer has its"),
        ("GPT2", ["lm_head"], "head shares its table; name other layers by --lora-targets"),
        ("Mixtral", ["all-linear"], "gate' could not be merged"),
        ("Mamba", ["out_proj"], "is incompatible"),
    ):
        base = tmp_path / kind
        if not base.exists():
            save_base(base, kind)
        with pytest.raises(Exception, match=why):
            add_lora(open_causal_lm(base), targets=targets)
    lm = open_causal_lm(save_base(tmp_path / "l"))
    lm.core.model.conv = torch.nn.Conv1d(2, 2, 1)
    lm.core.model.attention = torch.nn.MultiheadAttention(4, 2)
    lm.core.model.twin = lm.core.model.layers[0].self_attn.k_proj
    for target, why in (
        ("conv", "no linear layer has"), ("attention.out_proj", "does not call"),
        ("k_proj", "another layer has its weight"),
    ):  # fmt: skip
        with pytest.raises(Exception, match=why):
            add_lora(copy.deepcopy(lm), targets=["q_proj", target])


# Hashes.


@pytest.fixture(scope="module")
def folders(sessions, place):
    """Every kind of delivered folder, and what opens it."""
    for name in ("adapter", "whole", "gpt"):
        export(place / name, place / f"{name} exported")
    return {
        "adapter": lambda: opened(place / "adapter"),
        "whole": lambda: opened(place / "whole"),
        "classifier": lambda: opened_classifier(place / "classifier"),
        "adapter exported": lambda: open_causal_lm(place / "adapter exported"),
        "whole exported": lambda: open_causal_lm(place / "whole exported"),
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
    ["adapter", "whole", "classifier", "adapter exported", "whole exported", "gpt exported"],
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
    source = place / "whole exported"
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
