"""A plain loop for GPT-2 with LoRA in fp16: micro-batches accumulate, clipping follows unscaling.

The base model is frozen in fp16 and stays as it is, bit for bit; the adapters are fp32, so no
update is lost. A small byte-level GPT-2 is first trained on docstrings of the standard library;
adapters then learn the library's source code. With --model, the base is any GPT-2 folder.

Run: python examples/gpt2_lora.py [--model FOLDER] [--policy fp16-mixed]
"""

import argparse
import ast
import sysconfig
from pathlib import Path

import peft
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import halfstep

LENGTH, MICRO_BATCH, MICRO_BATCHES = 64, 4, 4
MAX_NORM, BASE_STEPS, STEPS = 0.25, 120, 60


def sources() -> list[str]:
    """Return the source text of two packages."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for name in ("asyncio", "email") for path in sorted(folder.glob(f"{name}/*.py"))]
    return [path.read_text(encoding="utf-8") for path in paths]


def docstrings(text: str) -> str:
    """Return the docstrings of a module, its classes and functions."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return "\n".join(filter(None, map(ast.get_docstring, nodes)))


def train(model, policy: str, ids: torch.Tensor, steps: int, rate: float) -> list:
    """Train: a step is MICRO_BATCHES forwards and backwards, and one update with all of them."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    precision = halfstep.Precision(policy, model, optimizer)
    generator = torch.Generator().manual_seed(1)
    results = []
    for step in range(1, steps + 1):
        for _ in range(MICRO_BATCHES):
            starts = torch.randint(len(ids) - LENGTH - 1, (MICRO_BATCH,), generator=generator)
            window = torch.stack([ids[start : start + LENGTH + 1] for start in starts])
            with precision.autocast():
                logits = model(window[:, :-1]).logits
            loss = functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
            precision.backward(loss / MICRO_BATCHES)  # gradients accumulate over micro-batches
        results.append(precision.step(max_norm=MAX_NORM))  # unscales, clips, updates; or skips
        if step % 20 == 0 or not results[-1].applied:
            last = results[-1]
            print(
                f"step {step:3}  loss {last.loss:.3f}  |gradient| {last.grad_norm:.3f}  "
                f"scale {last.loss_scale:g}  {'applied' if last.applied else last.reason}"
            )
    return results


def small_base() -> GPT2LMHeadModel:
    """Train a small byte-level GPT-2 on the docstrings."""
    ids = torch.tensor(list("\n".join(map(docstrings, sources())).encode()))
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, embd_pdrop=0.0,
            resid_pdrop=0.0, attn_pdrop=0.0, bos_token_id=10, eos_token_id=10,
        )
    )  # fmt: skip
    print("all weights of a small GPT-2, fp32, on docstrings")
    train(model, "fp32", ids, BASE_STEPS, rate=3e-3)
    return model


def main(folder: str = "", policy: str = "fp16-mixed") -> tuple[list, dict, dict]:
    torch.manual_seed(0)
    code = "\n".join(sources())
    if folder:
        base = AutoModelForCausalLM.from_pretrained(folder)
        ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(code)["input_ids"])
    else:
        base, ids = small_base(), torch.tensor(list(code.encode()))
    base = base.half()
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, fan_in_fan_out=True,
        target_modules=["c_attn", "c_fc", "c_proj"],
    )  # fmt: skip
    model = peft.get_peft_model(base, lora)  # adapters in fp32
    print(f"its adapters, {policy}, on source code")
    results = train(model, policy, ids, STEPS, rate=1e-2)
    after = {n.replace(".base_layer.", "."): w for n, w in base.state_dict().items()}
    same = all(torch.equal(after[name], weight) for name, weight in before.items())
    trained, every = model.get_nb_trainable_parameters()
    print(
        f"{trained:,} of {every:,} weights trained; the frozen ones are {base.dtype} "
        f"{'as before, bit for bit' if same else 'and CHANGED'}"
    )
    return results, before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="", help="folder of a GPT-2 with its tokenizer")
    parser.add_argument("--policy", default="fp16-mixed")
    arguments = parser.parse_args()
    main(arguments.model, arguments.policy)
