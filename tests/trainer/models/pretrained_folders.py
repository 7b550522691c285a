"""Tiny random Hugging Face models and tokenizers, written to folders."""

from __future__ import annotations

import contextlib
import io
import json

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from halfstep.trainer.models.pretrained import quiet

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=40, pad_token_id=0,
)  # fmt: skip
IDS = dict(bos_token_id=1, eos_token_id=2)


def config_of(kind, **changes):
    """The config of a tiny model of a kind such as "Bert" or "Llama"."""
    own = {
        "Albert": {**SMALL, "embedding_size": 16},
        "Roberta": {**SMALL, "pad_token_id": 1},
        "GPT2": dict(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=40, **IDS),
        "Bloom": dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=2, **IDS),
        "OPT": {**SMALL, **IDS, "ffn_dim": 48, "word_embed_proj_dim": 32},
        "Gemma2": {**SMALL, **IDS, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 2},
    }
    llama = {**SMALL, **IDS, "num_key_value_heads": 1}
    default = llama if kind in ("Llama", "Qwen2", "Mistral", "Cohere") else SMALL
    return getattr(transformers, f"{kind}Config")(**{**own.get(kind, default), **changes})


def model_of(kind, head, seed=0, **changes):
    """A tiny model with weights large enough for all of it to show."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}{head}")(config_of(kind, **changes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def save(model, folder):
    """Writes a model's folder without a progress bar in the test's output."""
    with quiet():
        model.save_pretrained(folder)
    return folder


def save_classifier(folder, kind="Bert", head="Model", **changes):
    return save(model_of(kind, head, **changes), folder)


def save_lm(folder, kind="Llama", dtype=torch.float32, **changes):
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return save(model_of(kind, head, **changes).to(dtype), folder)


def save_tokenizer(folder, pad="[PAD]", eos=None, words=("the", "cat", "sat", "on", "mat"), **more):
    """A word-level tokenizer with [CLS] and [SEP] around each text."""
    specials = [s for s in (pad, eos, "[UNK]", "[CLS]", "[SEP]") if s]
    vocabulary = {word: i for i, word in enumerate((*specials, *words))}
    engine = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(s, vocabulary[s]) for s in ("[CLS]", "[SEP]")],
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=engine,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        **({"pad_token": pad} if pad else {}),
        **({"eos_token": eos} if eos else {}),
        **more,
    )
    tokenizer.save_pretrained(folder)
    return folder


def edit_json(path, **changes):
    """Sets keys of a JSON file; ... removes one."""
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not ...}))


@contextlib.contextmanager
def silence():
    """Fails where anything is written to stdout or stderr."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield
    assert out.getvalue() == ""
