"""torch.compile is the default user: no break, no recompilation, and the bits of uncompiled code.

On CUDA's default switches, which are set on the CPU's, and on 16-bit instructions that are faked.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.precision.casting import autocast as module, cast
from halfstep.precision.policy.policy import POLICIES
from halfstep.trainer.models import GPTConfig
from halfstep.trainer.models.gpt import GPT

WAYS = ("model", "block", "loss", "inside", "decorated", "step")
NAMES = [name for name in POLICIES if name not in ("bf16-module", "tf32")]
RULES = "bf16-mixed,keep_fp32=norm"
PEOPLE_S = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-split")
RECIPES = ("fp8", "fp8-block", "mxfp8", "nvfp4", "bf16-split,recipe=fp8")
TOKENS = torch.arange(64).reshape(2, 32) % 60

pytestmark = [
    pytest.mark.usefixtures("torch_alone"),  # a compiled model runs by no kernel of ours
    # torch's own, as Dynamo looks at tensors and traces autograd functions
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    monkeypatch.setattr(module, "_is_simulated", lambda *_: False)
    before = torch.backends.mkldnn.conv.fp32_precision, torch.backends.mkldnn.rnn.fp32_precision
    torch.backends.mkldnn.conv.fp32_precision = torch.backends.mkldnn.rnn.fp32_precision = "tf32"
    yield
    torch.backends.mkldnn.conv.fp32_precision, torch.backends.mkldnn.rnn.fp32_precision = before
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(60, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Softmax(-1))])
        self.mix = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, tokens):
        h = self.norm(self.embedding(tokens))
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=False)
        # made here, as in BERT of transformers: Dynamo has a path of its own for this loss
        return nn.CrossEntropyLoss()(self.mix(h.mT), tokens % 32)


def mean(output):
    loss = getattr(output, "loss", output)
    return loss.float().mean()


class Plain:
    """The same loop under torch.autocast, without halfstep."""

    def __init__(self, model):
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16)

    def step(self, loss):
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    close = contextlib.nullcontext


def run(policy, way, make=Net, batch=None, backend="aot_eager"):
    """Five steps, the learning rate changed: losses; breaks, recompilations; nodes per graph."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, batch, nodes = make(), batch or {"tokens": TOKENS}, []
    if policy == "plain":
        own = Plain(model)
    else:
        kind = None if policy in ("bf16-mixed", "fp16-pure") else halfstep.optim.AdamW
        optimizer = (kind or torch.optim.AdamW)(model.parameters(), lr=0.1, eps=0.01)
        own = halfstep.Precision(policy, model, optimizer)

    def compiled(function):
        def count(graph, inputs):
            nodes.append(sum(n.op.startswith("call") for n in graph.graph.nodes))
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

        return torch.compile(function, backend=count)

    def loss_of():
        return mean(call(**batch))

    def inside():
        with own.autocast():
            return loss_of()

    context = own.autocast()

    def made():
        with context:
            return loss_of()

    def step():
        loss = inside()
        own.step(loss)
        return loss

    call, loss = model, inside
    if way == "model":
        call = compiled(model)
    elif way == "block":
        for part in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
            for name, block in part.named_children():
                part[int(name)] = compiled(block)
    elif way == "loss":
        loss = own.autocast()(compiled(loss_of))
    elif way == "inside":
        loss = compiled(inside)
    elif way == "made":
        loss = compiled(made)
    elif way == "decorated":
        loss = compiled(own.autocast()(loss_of))
    elif way == "step":
        step = compiled(step)
    found = []
    for number in range(5):
        if number == 3 and policy != "plain":
            optimizer.param_groups[0]["lr"] = 0.05
        if way == "step":
            found.append(step().item())
        else:
            value = loss()
            found.append(value.item())
            own.step(value)
    own.close()
    return found, sum(counters["graph_break"].values()), sum(counters["recompiles"].values()), nodes


def require_one_graph(policy, way, make=Net, **more):
    more["make"] = make
    losses, breaks, again, nodes = run(policy, way, **more)
    _, plain_breaks, plain_again, plain = run("plain", way, **more)
    if make is not Recurrent:  # which torch compiles in parts
        assert nodes, (policy, way)
        assert len(nodes) <= len(plain), (policy, way)
    # a break of the model's own counts once for each function around it, doors too: graphs decide
    assert breaks <= plain_breaks or (make is not Net and plain_breaks), (policy, way)
    assert again <= plain_again, (policy, way)
    if "fp16" not in policy:  # whose matmuls on a CPU sum in an order by layout
        assert losses == run(policy, "not compiled", **more)[0], (policy, way)


@pytest.mark.covering(ends=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", [*NAMES, RULES])
def test_a_policy_adds_no_break_no_recompilation_and_changes_no_bit(policy, way):
    require_one_graph(policy, way)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", ["model", "inside", "step"])
def test_a_recipe_does_not_either(recipe, way):
    require_one_graph(f"{recipe},simulate=yes", way, make=lambda: Net(128))


def test_a_graph_draws_other_random_bits_in_every_step_as_uncompiled_code_does():
    def gradients(compiled):
        torch.manual_seed(0)
        model, x = nn.Linear(32, 32), torch.randn(32, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        with halfstep.Precision("nvfp4,simulate=yes", model, optimizer) as own:
            for _ in range(2):
                with own.autocast():
                    loss = call(x).square().mean()
                own.backward(loss)
                yield model.weight.grad.clone()
                own.step()

    (first, second), plain = gradients(True), gradients(False)
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip((first, second), plain, strict=True))


def test_on_cuda_a_graph_has_the_nodes_of_torch_s_autocast_and_the_cast_of_the_output(monkeypatch):
    monkeypatch.setattr(module, "AutocastCasts", contextlib.nullcontext)  # of a CPU alone
    for way, more in (("model", 0), ("inside", 1)):  # whose cast is after the graph, and in it
        (plain,), (nodes,) = run("plain", way)[3], run("bf16-mixed", way)[3]
        assert nodes == plain + more


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "bert"])
@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-split", "fp16-mixed"])
def test_a_second_process_would_find_the_graphs_in_torch_s_cache(name, policy):
    make, batch = family(name)
    with fresh_cache():
        for found in ("miss", "hit"):
            run(policy, "model", make=make, batch=batch, backend="inductor")
            cached = counters["aot_autograd"]
            assert cached[f"autograd_cache_{found}"] == 1
            assert not cached["autograd_cache_bypass"]


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-split"])
def test_a_context_made_outside_is_entered_inside(policy):
    require_one_graph(policy, "made")


def test_a_context_without_a_model_is_made_and_entered_in_a_graph(monkeypatch):
    monkeypatch.setattr(cast, "_made", {})  # others' may simulate formats, as of another CPU
    layer, x = nn.Linear(8, 8), torch.ones(2, 8)

    @torch.compile(backend="eager", fullgraph=True)
    def inside():
        with halfstep.autocast("bf16-mixed", "cpu"):
            return layer(x)

    with halfstep.autocast("bf16-mixed", "cpu"):
        assert torch.equal(inside(), layer(x))
    assert torch.backends.mkldnn.conv.fp32_precision == "ieee"
    for context in cast._made.values():
        context.release()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "t5", "lstm", "transformer", "gpt"])
@pytest.mark.parametrize(
    "policy", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-split"]
)
def test_models_that_people_train(name, policy):
    make, batch = family(name)
    for way in WAYS:
        require_one_graph(policy, way, make=make, batch=batch, backend="eager")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(60, 32), nn.LSTM(32, 32, 2, batch_first=True)

    def forward(self, tokens):
        return self.layer(self.embedding(tokens))[0].square()


def family(name):
    if name == "lstm":
        return Recurrent, {"tokens": TOKENS}
    if name == "transformer":
        x = torch.linspace(-1, 1, 320).reshape(2, 5, 32)
        return lambda: nn.Transformer(32, 2, 1, 1, 32, 0.0, batch_first=True), {"src": x, "tgt": x}
    if name == "gpt":
        shape = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64)
        return lambda: GPT(shape), {"tokens_BT": TOKENS}
    hf = pytest.importorskip("transformers")
    width = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    kind, config = {
        "llama": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(intermediate_size=32, **width)),
        "bert": (hf.BertForMaskedLM, lambda: hf.BertConfig(intermediate_size=32, **width)),
        "gpt2": (hf.GPT2LMHeadModel, lambda: hf.GPT2Config(**width)),
        "t5": (
            hf.T5ForConditionalGeneration,
            lambda: hf.T5Config(
                vocab_size=64,
                d_model=128,
                d_kv=64,
                d_ff=128,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
            ),
        ),
    }[name]
    return lambda: kind(config()).eval(), {"input_ids": TOKENS, "labels": TOKENS}


@pytest.mark.parametrize(
    "policy", ["bf16-split", "bf16-split,keep_fp32=type:LayerNorm", "fp8,simulate=yes"]
)
def test_blocks_that_are_compiled_one_by_one_share_their_graphs(policy):
    parts = (nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128)) for _ in range(10))
    blocks = nn.Sequential(*parts)
    precision = halfstep.Precision(
        policy, blocks, halfstep.optim.AdamW(blocks.parameters(), lr=1e-3)
    )
    torch._dynamo.reset()
    counters.clear()
    for block in blocks:
        block.compile(backend="eager")
    for _ in range(2):
        with precision.autocast():
            loss = blocks(torch.randn(4, 128)).square().mean()
        precision.step(loss)
    assert counters["stats"]["unique_graphs"] < 5


def train(net, policy):
    """A step of a fresh Precision, whose loss is compiled with its context; the switch in it."""
    precision = halfstep.Precision(policy, net, torch.optim.SGD(net.parameters(), lr=0.1))

    @torch.compile(backend="eager", fullgraph=True)
    def loss_of():
        with precision.autocast():
            return net(TOKENS).mean()

    precision.step(loss_of())
    loss_of()
    held = torch.backends.mkldnn.conv.fp32_precision
    precision.close()
    return held


def test_each_precision_that_uses_a_graph_holds_its_switches():
    net = Net()
    assert [train(net, policy) for policy in ("fp32", "fp32", "bf16-mixed")] == ["ieee"] * 3
    assert torch.backends.mkldnn.conv.fp32_precision == "tf32"


def test_an_error_in_a_graph_leaves_no_context():
    net = Net()
    precision = halfstep.Precision("bf16-mixed", net, torch.optim.SGD(net.parameters(), lr=0.1))

    @torch.compile(backend="eager")
    def fails():
        try:
            with precision.autocast():
                net(TOKENS)
                raise ValueError
        except ValueError:
            return 1

    fails()
    assert module.active_autocast() is None
