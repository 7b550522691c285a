"""A small training program, sound or with one regression of its dtypes, for the contract."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.diagnostics.contract import contract

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class RMSNorm(nn.Module):
    """By hand, in fp32 and back, as large models have it."""

    def __init__(self, d, low=False):
        super().__init__()
        self.weight, self.low = nn.Parameter(torch.ones(d)), low

    def forward(self, x):
        y = x if self.low else x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, d, t, fault):
        super().__init__()
        self.qkv, self.out, self.fault = nn.Linear(d, 3 * d), nn.Linear(d, d), fault
        self.norm = RMSNorm(d, fault == "rms_norm")
        kind = BF16 if fault == "rope" else FP32
        self.register_buffer("cos", torch.randn(t, d).cos().to(kind), persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q = (self.norm(q) * self.cos).to(v.dtype)
        if self.fault == "sdpa":
            return self.out(
                F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
            )
        scores = q @ k.transpose(-1, -2)
        with torch.autocast("cpu", enabled=False):
            weights = (scores if self.fault == "softmax" else scores.float()).softmax(-1)
        return self.out(weights.to(v.dtype) @ v)


class Gate(nn.Linear):
    """A router, whose scores are fp32 under autocast, too."""

    low = False

    def forward(self, x):
        with torch.autocast("cpu", enabled=self.low):
            y = F.linear(x if self.low else x.float(), self.weight.float(), self.bias.float())
            return y.float().sigmoid()


class Block(nn.Module):
    def __init__(self, d, t, fault, last):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), RMSNorm(d, fault == "rms_norm")
        self.attn, self.gate, self.mlp = Attention(d, t, fault), Gate(d, 1), nn.Linear(d, d)
        self.gate.low = fault == "gate"
        self.fault, self.last = fault, last

    def forward(self, x):
        if self.fault == "norm":
            with torch.autocast("cpu", enabled=False):
                low = F.layer_norm(x.bfloat16(), x.shape[-1:]) * self.norm1.weight.bfloat16()
            x = x + self.attn(low)
        else:
            x = x + self.attn(self.norm1(x))
        off = self.last and self.fault == "no_autocast"
        with torch.autocast("cpu", enabled=False) if off else nullcontext():
            y = F.gelu(self.mlp(self.norm2(x.float()) if off else self.norm2(x)))
        if self.fault == "rounded_activation" and self.last:
            y = y.half().float()
        x = x + (self.gate(x) * y).to(x.dtype)
        return x.bfloat16() if self.fault == "residual" else x


class Net(nn.Module):
    def __init__(self, fault="", d=16, t=8, layers=2):
        super().__init__()
        self.embed = nn.Embedding(11, d)
        self.blocks = nn.ModuleList(Block(d, t, fault, i == layers - 1) for i in range(layers))
        self.head = nn.Linear(d, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LowMoments(torch.optim.AdamW):
    """AdamW whose moments, or step count, are rounded to bf16 between steps."""

    keys = ("exp_avg", "exp_avg_sq")

    def step(self, closure=None):
        for state in self.state.values():
            state.update({key: state[key].float() for key in self.keys})
        super().step(closure)
        for state in self.state.values():
            state.update({key: state[key].bfloat16() for key in self.keys})


class LowSteps(LowMoments):
    keys = ("step",)


def orthogonal(gradient, dtype):
    """Newton and Schulz, as Muon has it."""
    x = gradient.to(dtype)
    x = x / x.norm()
    return (1.5 * x - 0.5 * x @ x.mT @ x).to(gradient.dtype)


class Muonlike(torch.optim.SGD):
    dtype = FP32

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim == 2:
                    p.grad.copy_(orthogonal(p.grad, self.dtype))
        super().step(closure)


def model_of(fault, layers):
    model = Net(fault, layers=layers)
    if fault in ("pure", "pure_no_autocast"):
        model.bfloat16()
    if fault == "embedding":
        model.embed.bfloat16()
    if fault == "one_layer":
        model.blocks[-1].mlp.bfloat16()
    if fault == "grad_dtype":  # SGD takes it
        for p in model.parameters():
            p.grad_dtype = None
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.bfloat16()))
    if fault == "grad_hook":
        model.head.weight.register_hook(lambda g: g.bfloat16().float())
    return model


def optimizer_of(fault, parameters):
    if fault == "moments":
        return LowMoments(parameters, lr=1e-3)
    if fault == "step_count":
        return LowSteps(parameters, lr=1e-3)
    if fault.startswith("sgd") or fault == "grad_dtype":
        return torch.optim.SGD(parameters, lr=1e-3)
    if fault.startswith("muon"):
        optimizer = Muonlike(parameters, lr=1e-3, momentum=0.9)
        optimizer.dtype = BF16 if fault == "muon_bf16" else FP32
        return optimizer
    return torch.optim.AdamW(parameters, lr=1e-3)


def clipped(fault, model):
    if fault == "clip":
        norm = torch.stack([p.grad.bfloat16().norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.mul_((1 / (norm + 1e-6)).clamp(max=1).float())
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def trained(fault="", *, seed=0, batch=4, steps=2, accumulate=1, layers=2, evaluate=False):
    """The contract of a few steps under autocast to bf16, with an average of the weights."""
    torch.manual_seed(seed)
    model = model_of(fault, layers)
    optimizer = optimizer_of(fault, model.parameters())
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    if fault == "average":
        average = {n: p.bfloat16() for n, p in average.items()}
    kept = {}
    low = FP16 if fault == "fp16" else BF16
    with contract() as seen:
        for step in range(steps):
            for _ in range(accumulate):
                ids = torch.randint(0, 11, (batch, 9))
                with torch.autocast("cpu", low, enabled=fault != "pure_no_autocast"):
                    logits = model(ids[:, :-1])
                if fault not in ("loss", "pure_no_autocast"):
                    logits = logits.float()
                if fault == "rounded_logits":
                    logits = logits.bfloat16().float()
                (
                    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / accumulate
                ).backward()
            if fault == "grad_round":
                for p in model.parameters():
                    p.grad.copy_(p.grad.bfloat16())
            if fault == "buffer_grads":
                for n, p in model.named_parameters():
                    kept[n] = kept.get(n, 0) + p.grad.bfloat16()
            clipped(fault, model)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for n, p in model.named_parameters():
                    if fault == "weights_rounded":
                        p.copy_(p.bfloat16())
                    average[n].mul_(0.9).add_(p.to(average[n].dtype), alpha=0.1)
            if evaluate and step:
                with torch.no_grad(), torch.autocast("cpu", BF16):
                    model(ids[:, :-1]).softmax(-1).max()
    return seen.recorded()
