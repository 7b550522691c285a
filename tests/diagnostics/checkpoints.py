"""Small checkpoints, trained here, sound ones and some with a fault planted in them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

F32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
WIDTH, WORDS, LAYERS = 64, 96, 4
SHAPES = {
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
    "self_attn.q_norm": (WIDTH,),
}
SHAPES |= {f"self_attn.{k}_proj": (WIDTH, WIDTH) for k in "qkvo"}
SHAPES |= {"mlp.up_proj": (128, WIDTH), "mlp.down_proj": (WIDTH, 128)}


def fresh(biases):
    """Parameters of a decoder by Llama's names, with biases of norms if asked."""
    shapes = {f"model.layers.{i}.{k}": shape for i in range(LAYERS) for k, shape in SHAPES.items()}
    shapes |= {
        "model.norm": (WIDTH,),
        "model.embed_tokens": (WORDS, WIDTH),
        "lm_head": (WORDS, WIDTH),
    }
    start = {k: torch.randn(s) * 0.02 if len(s) > 1 else torch.ones(s) for k, s in shapes.items()}
    found = {f"{k}.weight": v for k, v in start.items()}
    return found | {f"{k}.bias": torch.zeros(WIDTH) for k in start if "norm" in k and biases}


def logits(p, tokens):
    def normed(x, name):
        weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
        if bias is None:
            return functional.rms_norm(x, (WIDTH,), weight, 1e-5)
        return functional.layer_norm(x, (WIDTH,), weight, bias)

    x = p["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        y = normed(x, f"{at}.input_layernorm")
        q, k, v = (y @ p[f"{at}.self_attn.{name}_proj.weight"].T for name in "qkv")
        q = normed(q, f"{at}.self_attn.q_norm")
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + y @ p[f"{at}.self_attn.o_proj.weight"].T
        y = normed(x, f"{at}.post_attention_layernorm") @ p[f"{at}.mlp.up_proj.weight"].T
        x = x + functional.silu(y) @ p[f"{at}.mlp.down_proj.weight"].T
    return normed(x, "model.norm") @ p["lm_head.weight"].T


@cache
def trained(dtype=F32, *, biases=False, steps=30, lr=1e-3):
    """The weights before and after training in one dtype, and the state of torch's AdamW."""
    torch.manual_seed(7)
    first = cast(fresh(biases), dtype)
    p = {k: v.clone().requires_grad_() for k, v in first.items()}
    optimizer = torch.optim.AdamW(p.values(), lr=lr, weight_decay=0.0, eps=1e-6)
    for _ in range(steps):
        tokens = torch.randint(0, WORDS, (8, 16))
        tokens[:, 1::2] = (tokens[:, ::2] * 5 + 3) % WORDS
        found = logits(p, tokens[:, :-1]).float().flatten(0, 1)
        functional.cross_entropy(found, tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return first, {k: v.detach() for k, v in p.items()}, optimizer.state_dict()


def after(dtype=F32, **how):
    return dict(trained(dtype, **how)[1])


def cast(state, dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}


def states(dtype=F32, **how):
    """The optimizer's state as FSDP2's checkpoints name it."""
    names, numbered = [*fresh(False)], trained(dtype, **how)[2]["state"]
    rows = [(f"optim.state.{names[i]}", each) for i, each in numbered.items()]
    return {f"{name}.{key}": value.clone() for name, each in rows for key, value in each.items()}


def like(state, *parts):
    return {k for k in state if any(part in k for part in parts)}


def ones(state, names):
    return state | {k: torch.ones_like(state[k]) for k in names}


def under(prefix, state):
    return {prefix + k: v for k, v in state.items()}


class Case(NamedTuple):
    """Tensors in a file or folder, with JSON beside them; what must be found, and the base."""

    tensors: Any
    finding: str = ""
    names: Any = ()
    how: str = "safetensors"
    said: Any = None
    base: Any = None


def write(folder, tensors, how="safetensors", said=None):
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in (said or {}).items():
        (folder / f"{name}.json").write_text(json.dumps(table))
    if how == "sharded":
        halves = {"model-1-of-2": sorted(tensors)[::2], "model-2-of-2": sorted(tensors)[1::2]}
        for file, keys in halves.items():
            save_file({k: tensors[k].contiguous() for k in keys}, folder / f"{file}.safetensors")
        table = {k: f"{file}.safetensors" for file, keys in halves.items() for k in keys}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    elif how == "dcp":
        dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)
    elif how == "safetensors":
        save_file(
            {k: v.clone().contiguous() for k, v in tensors.items()}, folder / "model.safetensors"
        )
    else:
        torch.save(tensors, folder / how)
    return folder


def norms_in_most_entries():
    state = cast(after(), BF16)
    state = ones(state, like(state, "norm"))
    for name in like(state, "norm"):
        state[name][:14] = 1 + torch.linspace(-0.2, 0.2, 14)
    return Case(state, "norms_at_one", like(state, "norm"))


def numbered_moments():
    """As a Trainer's folder has them, of a run in bf16: the weights, and states by number."""
    state, optimizer = after(BF16), trained(BF16)[2]
    named = ones(state, like(state, "norm"))
    return Case({"model": named, "optimizer": optimizer}, "norms_at_one",
                like(under("model.", named), "norm"), "training.pt")  # fmt: skip


def masters_of_weights():
    weights, slashed = after(BF16, lr=3e-3), {}
    for name, value in cast(states(), F32).items():
        owner, _, key = name.removeprefix("optim.state.").rpartition(".")
        slashed[f"{owner}/{key}"] = value
    masters = {f"{k}/master": v.float() for k, v in weights.items() if v.ndim > 1}
    return Case(weights | slashed | masters, "masters_narrow", set(masters))


def rounded_moments():
    rounded = {i: cast(cast(s, BF16), F32) for i, s in trained()[2]["state"].items()}
    names = {f"opt.state.{i}.{k}" for i in rounded for k in ("exp_avg", "exp_avg_sq")}
    return Case({"model": after(), "opt": {"state": rounded}}, "moments_narrow", names, "all.ckpt")


def flushed_moments():
    low = {k: (v * 1e-3).half() if k.endswith("sq") else v for k, v in states(BF16).items()}
    lost = {k for k in like(low, "exp_avg_sq") if (low[k] == 0).float().mean() > 0.2}
    kept = {k: v for k, v in low.items() if "sq" not in k or k in lost}
    return Case(cast(after(), BF16) | kept, "moments_flushed", lost)


def quantized(cut=1.0, rows=0, dtype=FP8, scale=None):
    """Linear weights in fp8 by one scale, or by one for each block of rows x rows."""
    state, largest = cast(after(), BF16), torch.finfo(dtype).max
    names = like(state, "proj")
    for key in names:
        weight = after()[key]
        blocks = weight.unflatten(1, (-1, rows)).unflatten(0, (-1, rows)) if rows else weight
        top = blocks.abs().amax((1, 3), keepdim=True) if rows else weight.abs().max()
        by = torch.full_like(top, scale) if scale else top / largest / cut
        codes = (blocks / by).clamp(-largest, largest).to(dtype)
        state[key] = codes.flatten(2).flatten(0, 1) if rows else codes
        state[key + ("_scale_inv" if rows else "_scale")] = by.squeeze().float()
    return state, names


def adapter(zero):
    torch.manual_seed(1)
    stem = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
    a = {stem.format(i, k, "A"): torch.randn(4, 64) for i in range(4) for k in "qv"}
    b = {
        stem.format(i, k, "B"): torch.randn(64, 4) * (k not in zero) for i in range(4) for k in "qv"
    }
    return Case(a | b, "adapter_zero" * bool(zero), {k for k in b if not b[k].any()})


def parted(change, **more):
    state = after()
    state["lm_head.weight"] = change(state["model.embed_tokens.weight"].clone())
    return Case(state, "tied_parted", {"lm_head.weight", "model.embed_tokens.weight"}, **more)


def merged():
    """A LoRA merged into 16-bit weights: of its roles all, of others none."""
    low = cast(trained()[0], BF16)
    delta = {
        k: 0.02 * torch.randn(64, 4) @ torch.randn(4, 64) for k in like(low, "q_proj", "v_proj")
    }
    return Case(low | {k: (low[k].float() + v).bfloat16() for k, v in delta.items()}, base=low)


FIRST, STATE, LOW = trained()[0], after(), cast(after(lr=3e-3), BF16)
PURE = after(BF16)
WIDE = cast(LOW, F32)
NORMS = like(STATE, "norm")
NAN = STATE["lm_head.weight"].clone()
NAN.view(torch.int32)[5, 5] = 0x7F800001
SINKS = {f"model.layers.{i}.self_attn.sinks": torch.randn(8) for i in range(LAYERS)}
GATES = {
    f"model.layers.{i}.mlp.gate.e_score_correction_bias": torch.randn(32).bfloat16()
    for i in range(4)
}
VARIANCES = {f"bn.{i}.running_var": torch.rand(64).bfloat16().float() for i in range(3)}
STEPS = {k: torch.tensor(256.0, dtype=BF16) for k in like(states(), "step")}
IA3 = {f"base_model.model.h.{i}.mlp.ia3_l": torch.ones(1, 64) for i in range(3)}
LAYER = "model.layers.2.mlp.up_proj.weight"
DOWN = {f"model.layers.{i}.mlp.down_proj.weight" for i in (1, 2)}
TIED, UNTIED = ({"config": {"tie_word_embeddings": tied}} for tied in (True, False))
BIASED = cast(after(biases=True, steps=60), BF16)
STILL = {k for k in like(BIASED, "norm") if k.endswith("weight")}
SMALL = cast({k: v * (1e-3 if "proj" in k else 1) for k, v in STATE.items()}, FP16)

PLANTED = {
    "norms beside biases": lambda: Case(ones(BIASED, STILL), "norms_at_one", STILL),
    "norms beside matrices": lambda: Case(ones(after(BF16, lr=2e-3), NORMS), "norms_at_one", NORMS,
                                          said={"config": {"initializer_range": 0.02}}),
    "norms beside moments": lambda: Case(under("model.", ones(PURE, NORMS)) | states(BF16),
        "norms_at_one",
                                         like(under("model.", STATE), "norm"), "dcp"),
    "norms beside numbered moments": numbered_moments,
    "norms of one role": lambda: Case(ones(LOW, like(LOW, "q_norm")), "norms_at_one", like(LOW,
        "q_norm"),
                                      "pytorch_model.bin"),
    "norms in most entries": norms_in_most_entries,
    "layers equal to the base": lambda: Case(STATE | {k: FIRST[k] for k in DOWN}, "equal_to_base",
        DOWN,
                                             "sharded", base=FIRST),
    "norms equal to the base": lambda: Case(
        under("policy.net.", {k: v if k in NORMS else v * 1.01 for k, v in STATE.items()}),
        "equal_to_base", like(under("policy.net.", STATE), "norm"), base=STATE),
    "all equal to the base": lambda: Case(STATE, "equal_to_base", set(STATE), "dcp", base=STATE),
    "a release's fp32": lambda: Case({k: v + v / 50 for k, v in LOW.items()} | cast(SINKS, BF16),
                                     "not_in_fp32", set(SINKS), base=LOW | SINKS),
    "bf16 in fp32": lambda: Case(WIDE, "narrow_values", set(WIDE)),
    "bf16 in fp32, sharded": lambda: Case(under("module.", WIDE), "narrow_values",
        set(under("module.", WIDE)),
                                          "sharded"),
    "bf16 in fp32, distributed": lambda: Case(under("app.", WIDE), "narrow_values",
        set(under("app.", WIDE)), "dcp"),
    "fp16 in fp32": lambda: Case(cast(cast(after(lr=3e-3), FP16), F32), "narrow_values", set(WIDE)),
    "masters of weights": masters_of_weights,
    "rounded moments": rounded_moments,
    "flushed moments": flushed_moments,
    "steps in bf16": lambda: Case(under("model.", STATE) | states() | STEPS, "steps_narrow",
        set(STEPS), "dcp"),
    "batches in fp16": lambda: Case(STATE | {"bn.num_batches_tracked": torch.tensor(30.0).half()},
        "steps_narrow",
                                    {"bn.num_batches_tracked"}, "model.pth"),
    "rounded statistics": lambda: Case(STATE | VARIANCES | {"bn.9.running_var": torch.rand(64)},
                                       "statistics_narrow", set(VARIANCES)),
    "an average in bf16": lambda: Case({"ema": LOW, "model": STATE}, "averages_narrow",
        set(under("ema.", LOW)),
                                       "last.ckpt"),
    "an average that is the weights": lambda: Case({"model": STATE, "ema_model": STATE, "step": 30},
                                                   "average_equal", set(under("ema_model.",
                                                   STATE)), "a.pt"),
    "a layer in bf16": lambda: Case(STATE | {LAYER: STATE[LAYER].bfloat16()}, "not_in_fp32",
        {LAYER}, "sharded"),
    "routers in bf16": lambda: Case(LOW | GATES, "not_in_fp32", set(GATES),
                                    said={"config": {"model_type": "deepseek_v3"}}),
    "fp8, cut off": lambda: Case(quantized(4)[0], "fp8_saturated", quantized()[1]),
    "fp8 by block, cut off": lambda: Case(quantized(5, 32, torch.float8_e5m2)[0], "fp8_saturated",
        quantized()[1]),
    "fp8 with scales of 1": lambda: Case(
        {k: v.to(torch.float8_e8m0fnu) if "scale" in k else v
         for k, v in quantized(rows=32, scale=1)[0].items()}, "fp8_unscaled", quantized()[1]),
    "one NaN": lambda: Case(STATE | {"lm_head.weight": NAN}, "not_finite", {"lm_head.weight"},
        "pytorch_model.bin"),
    "moments in bf16, in fp32 by config.json": lambda: Case(
        STATE | states(BF16), "moments_narrow", like(states(), "exp_avg"),
        said={"config": {"dtype": "float32"}}),
    "subnormal": lambda: Case(SMALL, "subnormal", like(SMALL, "proj")),
    "an adapter of zeros": lambda: adapter("qv"),
    "an adapter without queries": lambda: adapter("q")._replace(how="adapter_model.bin"),
    "ia3 of ones": lambda: Case(IA3, "adapter_zero", set(IA3)),
    "a head that left its tie": lambda: parted(lambda x: x + torch.randn_like(x) * 1e-3, said=TIED),
    "a tie that is not declared": lambda: parted(lambda x: x.index_fill_(0, torch.tensor(3),
        0.01), how="model.pt"),
}  # fmt: skip

SOUND = {
    "fp32": lambda: Case(STATE, how="sharded"),
    "rounded to bf16 when saved": lambda: Case(LOW),
    "rounded to fp16 when saved": lambda: Case(cast(STATE, FP16), how="pytorch_model.bin"),
    "a short run": lambda: Case(cast(after(steps=3, lr=1e-4), BF16),
        said={"config": {"initializer_range": 0.02}}),
    "a short run with biases": lambda: Case(cast(after(biases=True, steps=3, lr=1e-4), BF16)),
    "fresh": lambda: Case(FIRST),
    "fresh in bf16": lambda: Case(cast(FIRST, BF16), said={"config": {"initializer_range": 0.02}}),
    "fresh by torch": lambda: Case(nn.TransformerEncoderLayer(64, 4).bfloat16().state_dict()),
    "a warm-up from 0": lambda: Case(after(BF16, steps=2, lr=0.0) | states(BF16, steps=2, lr=0.0)),
    "with states": lambda: Case(under("model.", STATE) | states(), how="dcp"),
    "a widened copy, declared": lambda: Case(WIDE, said={"config": {"dtype": "bfloat16"}}),
    "masters of step 0": lambda: Case({f"{k}/master": v for k, v in WIDE.items()}),
    "fp8 by tensor": lambda: Case(quantized()[0]),
    "fp8 by block": lambda: Case(quantized(rows=32)[0]),
    "int8": lambda: Case({k: (v * 99).to(torch.int8) if v.ndim > 1 else v for k,
        v in STATE.items()}),
    "a fresh adapter, declared": lambda: adapter("qv")._replace(finding="",
        said={"trainer_state": {"global_step": 0}}),
    "untied": lambda: Case(STATE, said=UNTIED),
    "saved twice": lambda: Case(STATE | {"lm_head.weight": STATE["model.embed_tokens.weight"]},
        said=TIED),
    "a mask": lambda: Case(STATE | {"h.0.attn.mask": torch.full((8, 8), -torch.inf).triu(1)}),
    "statistics": lambda: Case(STATE | {"bn.running_var": torch.rand(64),
        "bn.num_batches_tracked": torch.tensor(0)}),
    "folded norms": lambda: Case(ones(LOW, NORMS), said={
        "config": {"quantization_config": {}, "initializer_range": 0.02}}),
    "trained from a base": lambda: Case(STATE, base=FIRST),
    "exported in bf16 beside its base": lambda: Case(cast(STATE, BF16), base=FIRST),
    "a merged adapter": merged,
    "frozen layers": lambda: Case({k: FIRST[k] if k in like(STATE, "layers.0", "layers.1",
        "embed") else v
                                   for k, v in STATE.items()}, base=FIRST),
}  # fmt: skip
