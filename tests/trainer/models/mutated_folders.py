"""Opens mutated model folders in a process whose ``kernels`` package only notes its calls.

``python -m tests.trainer.models.mutated_folders SEED COUNT`` prints what came of them as JSON.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import json
import random
import sys
import tempfile
from pathlib import Path

STUB = """
import sys
calls = []

def get_kernel(*args, **kwargs):
    calls.append(repr((args, kwargs)))
    raise RuntimeError("a kernel was asked for")

get_local_kernel = load_kernel = has_kernel = get_kernel

def _same(*args, **kwargs):
    return lambda decorated: decorated

use_kernel_forward_from_hub = use_kernelized_func = use_kernel_func_from_hub = _same
replace_kernel_forward_from_hub = register_kernel_mapping = use_kernel_mapping = _same

class _Plain:
    def __init__(self, *args, **kwargs):
        pass

CUDAProperties = Device = LayerRepository = LocalLayerRepository = ROCMProperties = _Plain
FuncRepository = LocalFuncRepository = KernelizeFallback = Mode = _Plain
kernelize = get_kernel
"""
EVIL = [
    "evil/kernel", "kernels-community/flash-attn2", "paged|evil/kernel",
    "evil/kernel@main:forward", " evil/kernel ", "flash_attention_2", "flash_attention_3",
    "flex_attention", "eager", "sdpa", {"": "evil/kernel"},
    {"text_config": "evil/kernel", "": "sdpa"}, ["evil/kernel"],
]  # fmt: skip
KEYS = [
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "attn_implementation_internal", "experts_implementation", "_experts_implementation",
    "_experts_implementation_internal", "kernel_config", "use_kernels",
]  # fmt: skip
NESTED = ["__dict__", "__class__", "sub_configs", "per_layer_config", "text_config", "update"]
CODE = [
    "auto_map", "custom_pipelines", "quantization_config", "configuration_files",
    "tokenizer_class", "trust_remote_code", "custom_generate", "architecture",
]  # fmt: skip
JUNK = [
    None, "x", "", -1, 0, 1, 3, 10**4, 10**10, 1.5, float("nan"), True, [], {}, "../x", "é" * 99,
]  # fmt: skip
CLASSES = [
    "BertModel", "AutoModelForCausalLM", "RagTokenizer", "AutoTokenizer", "BertTokenizerFast",
    "GPT2Tokenizer", "pipeline", "os", "../x", 7, "",
]  # fmt: skip


def stub_kernels(folder: Path, version: str) -> None:
    """Writes a package ``kernels`` that transformers takes for the real one."""
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text(STUB + f"__version__ = {version!r}\n")
    info = folder / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")


def levels(value):
    """A JSON value's dictionaries."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from levels(inner)


def mutate(draw: random.Random, found: dict) -> None:
    """One change for the worse, somewhere."""
    level = draw.choice(list(levels(found)))
    evil = copy.deepcopy(draw.choice(EVIL))
    kind = draw.randrange(8)
    if kind <= 2:
        level[draw.choice(KEYS)] = evil
    elif kind == 3:  # another name for the key
        level["attribute_map"] = {"harmless": draw.choice(KEYS[:6])}
        level["harmless"] = evil
    elif kind == 4:
        level[draw.choice(NESTED)] = draw.choice([{draw.choice(KEYS): evil}, "x", {"": {}}])
    elif kind == 5:
        key = draw.choice(CODE)
        value = draw.choice(
            [{"AutoConfig": "evil--x.C", "AutoModel": "m.M"}, ["config.4.0.0.json"], "hf-hub:e/x"]
        )
        level[key] = draw.choice(CLASSES) if key == "tokenizer_class" else value
    elif kind == 6 and level:
        del level[draw.choice(list(level))]
    elif level:
        level[draw.choice(list(level))] = copy.deepcopy(draw.choice(JUNK))


def write(bases: list[Path], draw: random.Random, folder: Path) -> Path:
    """A copy of a base with one to three mutations of its JSON files."""
    base = draw.choice(bases)
    files = ["config.json"] * 4 + ["generation_config.json", "tokenizer_config.json"]
    found = {}
    for path in base.iterdir():
        if path.suffix == ".json":
            found[path.name] = json.loads(path.read_text())
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    for _ in range(draw.choice([1, 1, 2, 3])):
        mutate(draw, found.setdefault(draw.choice(files), {}))
    if draw.random() < 0.1:  # what configuration_files leads to
        evil = {**copy.deepcopy(found["config.json"]), "_attn_implementation": "evil/kernel"}
        (folder / "config.4.0.0.json").write_text(json.dumps(evil))
    for name, content in found.items():
        (folder / name).write_text(json.dumps(content))
    return base


def main(seed: int, count: int) -> None:
    """Opens ``count`` folders as a tokenizer, and as a classifier or a language model."""
    import kernels
    import transformers
    from tests.trainer.models.pretrained_folders import (
        IDS,
        SMALL,
        save,
        save_classifier,
        save_lm,
        save_tokenizer,
    )

    from halfstep.errors import HalfstepError
    from halfstep.trainer.models.pretrained.classifier import open_classifier
    from halfstep.trainer.models.pretrained.lm import open_causal_lm
    from halfstep.trainer.models.pretrained.tokenizer import open_tokenizer

    assert transformers.utils.is_kernels_available(), "the stub is not taken for the package"
    outcomes: collections.Counter[str] = collections.Counter()
    raw: list[str] = []
    out = io.StringIO()
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(out):
        root = Path(place)
        text = {**SMALL, **IDS, "num_key_value_heads": 1, "head_dim": 16}
        vision = dict(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
            image_size=16, patch_size=8,
        )  # fmt: skip
        nested = transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(
                text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=3
            )
        )
        bases = [
            save_classifier(root / "bert"),
            save_lm(root / "gpt2", "GPT2"),
            save_lm(root / "llama", "Llama"),
            save(nested, root / "gemma3"),
        ]
        for base in bases:
            save_tokenizer(base, model_max_length=32)
        draw = random.Random(seed)
        for i in range(count):
            folder = root / f"m{i}"
            folder.mkdir()
            write(bases, draw, folder)
            opens = {
                "classifier": lambda f: open_classifier(f, ["a", "b"]),
                "lm": open_causal_lm,
                "tokenizer": lambda f: open_tokenizer(f, max_length=16),
            }
            del opens["lm" if i % 2 else "classifier"]  # in turn, for time's sake
            for name, opened in opens.items():
                try:
                    opened(folder)
                    outcomes[f"{name} opened"] += 1
                except HalfstepError as error:
                    outcomes[f"{name} refused"] += 1
                    if "a kernel was asked for" in str(error):
                        raw.append(f"{i} {name}: {error}")
                except Exception as error:
                    raw.append(f"{i} {name}: {type(error).__name__}: {error}")
    print(json.dumps({"calls": kernels.calls, "raw": raw, **outcomes}), file=sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
