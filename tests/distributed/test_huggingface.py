"""Hugging Face models of tiny configurations, unchanged, over several ranks."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from distributed.parity import fingerprint, same_bits, whole
from halfstep.distributed.layout import Layout
from halfstep.distributed.strategy import choose_strategy, plan_of
from halfstep.precision.policy.spelling import parse_policy
from halfstep.precision.step import Precision
from halfstep.trainer.config.run import OptimizerConfig
from halfstep.trainer.optimizer import make_optimizer

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(autouse=True)
def packages():
    """Imported when these tests run, not where they are collected."""
    pytest.importorskip("transformers")


ROWS, LENGTH, WORDS, CLASSES = 8, 12, 53, 3


def gpt2():
    transformers = importlib.import_module("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(4)
    return transformers.GPT2LMHeadModel(config)


def bert():
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=16, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(4)
    return transformers.BertForSequenceClassification(config)


MODELS = {"gpt2": gpt2, "bert": bert}


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return tokens, tokens.remainder(CLASSES)[:, 0]


def loss_sum(model, tokens, classes):
    logits = model(input_ids=tokens).logits
    if logits.dim() == 3:
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
    return F.cross_entropy(logits, classes, reduction="sum")


def run(rank, name, layout, policy, *, micro=1, steps=3):
    value = parse_policy(policy)
    strategy = choose_strategy(Layout.parse(layout), value, torch.device("cpu"))
    model = MODELS[name]().train()
    strategy.place_(model, plan_of(model))
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2), value)
    precision = Precision(value, model, optimizer, ranks=strategy.ranks)
    strategy.attach_(precision)
    results = []
    for step in range(steps):
        tokens, classes = batch(step)
        size = ROWS // strategy.layout.batch_ranks
        start = strategy.batch_rank * size
        (count,) = strategy.sum([size * ((LENGTH - 1) if name == "gpt2" else 1)])
        for part in range(micro):
            here = slice(start + part * size // micro, start + (part + 1) * size // micro)
            with strategy.micro_batch(last=part == micro - 1), precision.autocast():
                precision.backward(loss_sum(model, tokens[here], classes[here]) / count)
        strategy.finish()
        before = fingerprint(model, precision)
        results.append(precision.step())
        assert (fingerprint(model, precision) == before) != results[-1].applied
    named = dict(model.named_parameters())
    weights = {n: whole(named[n], m) for n, m in precision.masters.items()}
    return [r.loss for r in results], [r.applied for r in results], weights


def same(many, one):
    for losses, applied, weights in many:
        assert losses == one[0]
        assert applied == one[1]
        same_bits(weights, one[2])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["data=2", "shard=2"])
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed"])
def test_two_ranks_are_one_device_bit_for_bit(pool2, name, layout, policy):
    same(
        pool2.run(run, name=name, layout=layout, policy=policy),
        run(0, name, "data=1", policy, micro=2),
    )
