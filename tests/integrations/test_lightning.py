"""halfstep in Lightning's Trainer, against halfstep's own loop and Lightning's own plugins."""

import itertools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.errors import ConfigError, NonFiniteError, PrecisionError
from halfstep.optim import AdamW
from halfstep.precision.step import Precision

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402

from halfstep.integrations.lightning import (  # noqa: E402
    HalfstepPrecision,
    StepLog,
)

pytestmark = [
    # Lightning 2.6 with torch 2.13's pytree, at every dataloader.
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than"),
]
POLICIES = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-split",
            "bf16-kahan", "bf16-sr")  # fmt: skip
RECIPE = "bf16-mixed,recipe=bf16/bf16/nvfp4,simulate=yes"
STATIC = "fp32,scale=static,init_scale=1024"
OVERFLOW, WIDTH = 3, 8
BATCHES, BATCH = 6, 8


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))


def mse(output, targets):
    # An eighth, so that fp16 gradients fit at the scale 2^16 and all overflows are planted ones.
    return nn.functional.mse_loss(output, targets) / 8


def spoilt(tensor, value):
    """The tensor itself; its gradient becomes ``value``."""
    tensor.register_hook(lambda gradient: torch.full_like(gradient, value))
    return tensor


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[k], second[k]) and first[k].dtype == second[k].dtype for k in first
    )


def moments(optimizer):
    """Their bits, to be compared."""
    return [
        {
            k: (v.dtype, v.reshape(-1).view(torch.uint8).tolist())
            for k, v in state.items()
            if isinstance(v, torch.Tensor)
        }
        for state in optimizer.state.values()
    ]


def batches(number=BATCHES):
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(number * BATCH, WIDTH, generator=generator)
    return TensorDataset(inputs, inputs[:, :2].sum(dim=1, keepdim=True))


def loader(rows=BATCH):
    return DataLoader(batches(), batch_size=rows)


class Regression(pl.LightningModule):
    def __init__(self, *, schedule=False, bad=(), value=math.inf, through="net", make=AdamW):
        super().__init__()
        self.net = network()
        self.schedule, self.bad, self.value, self.through, self.make = (
            schedule, bad, value, through, make)  # fmt: skip
        self.outputs, self.rates, self.losses = [], [], []

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, index):
        inputs, targets = batch
        output = self.net(inputs) if self.through == "net" else self(inputs)
        self.outputs.append(output.dtype)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx in self.bad:
            output = spoilt(output, self.value)
        loss = mse(output, targets)
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *args):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = self.make(self.parameters(), lr=0.01)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def trainer(plugin, **options):
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False} | options
    plugins = [] if plugin is None else [plugin]
    return pl.Trainer(
        accelerator="cpu", plugins=plugins, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


def fit(plugin, model=None, **options):
    model = Regression() if model is None else model
    run = trainer(plugin, **options)
    run.fit(model, loader())
    return model, run


# The whole policy -----------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("through", ["net", "forward"])
@pytest.mark.parametrize("policy", [*POLICIES, RECIPE])
def test_a_policy_in_the_trainer_is_halfsteps_own_loop_bit_for_bit(policy, through):
    bad = (OVERFLOW,) if policy.startswith("fp16") else ()
    model = Regression(schedule=True, bad=bad, through=through)
    plugin = HalfstepPrecision(policy)
    fit(plugin, model, gradient_clip_val=0.5, accumulate_grad_batches=2)

    whole = Regression()  # random bits follow the names of layers
    net = whole.net
    optimizer = AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    precision = Precision(policy, whole, optimizer)
    results = []
    for index, (inputs, targets) in enumerate(loader()):
        with precision.autocast():
            output = whole(inputs)
            output = spoilt(output, math.inf) if index in bad else output
            loss = mse(output, targets) / 2
        precision.backward(loss)
        if index % 2 == 1:
            results.append(precision.step(max_norm=0.5))
            if results[-1].applied:
                scheduler.step()
    assert same(weights(model.net), weights(net))
    assert plugin.state_dict() == precision.state_dict()
    assert plugin.last_step == results[-1]
    assert [r.applied for r in results] == [True, not bad, True]
    assert model.rates[-1] == optimizer.param_groups[0]["lr"] == 0.01 * 0.5 ** (2 if bad else 3)
    assert set(model.outputs) == {torch.float32}


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_of_unscaled_gradients(algorithm):
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    make = torch.optim.SGD
    plain, _ = fit(None, Regression(make=make), **options)
    free, _ = fit(None, Regression(make=make))
    ours, _ = fit(HalfstepPrecision(STATIC), Regression(make=make), **options)
    for name, weight in weights(plain).items():
        # The norm's factor is rounded once in fp64 here, a few times in fp32 there: 6 steps of a
        # few units of 2^-24.
        torch.testing.assert_close(weights(ours)[name], weight, rtol=1e-6, atol=1e-7)
        assert (weights(free)[name] - weight).abs().max() > 1e-5
    if algorithm == "value":
        assert same(weights(ours), weights(plain))


class Watcher(pl.Callback):
    """What was there before and after each step, and what the hook before a step sees."""

    def __init__(self):
        self.before, self.after, self.norms = [], [], []

    def state(self, run, model):
        (optimizer,) = run.optimizers
        return weights(model), moments(optimizer), optimizer.param_groups[0]["lr"]

    def on_train_batch_start(self, run, model, *args):
        self.before.append(self.state(run, model))

    def on_train_batch_end(self, run, model, *args):
        self.after.append(self.state(run, model))

    def on_before_optimizer_step(self, run, model, optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        known = [g.double().square().sum() for g in grads if g is not None]
        self.norms.append(math.sqrt(sum(known)))


def identical(first, second):
    return same(first[0], second[0]) and first[1:] == second[1:]


PLUGINS = {
    "fp16-mixed": lambda: HalfstepPrecision("fp16-mixed"),
    "fp16-master": lambda: HalfstepPrecision("fp16-master"),
    "fp32-dynamic": lambda: HalfstepPrecision("fp32,scale=dynamic"),
}


@pytest.mark.covering
@pytest.mark.parametrize(
    ("clip", "value"), [(None, math.inf), ("norm", math.nan), ("value", math.inf)]
)
@pytest.mark.parametrize("name", PLUGINS)
def test_an_overflow_at_a_chosen_step_changes_nothing(name, clip, value):
    plugin, watcher = PLUGINS[name](), Watcher()
    model = Regression(schedule=True, bad=(OVERFLOW,), value=value)
    options = {} if clip is None else {"gradient_clip_val": 0.1, "gradient_clip_algorithm": clip}
    _, run = fit(plugin, model, callbacks=[watcher], **options)
    for step, (before, after) in enumerate(zip(watcher.before, watcher.after, strict=True)):
        assert identical(before, after) == (step == OVERFLOW), step
    assert plugin.last_step.skipped_total == 1
    assert model.rates[-1] == 0.01 * 0.5 ** (BATCHES - 1)
    assert run.global_step == BATCHES  # Lightning counts attempts


@pytest.mark.parametrize("name", [*PLUGINS, "bf16-mixed", "fp32"])
def test_a_loss_that_is_nan_stops_with_its_cause(name):
    class Broken(Regression):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            if index == OVERFLOW:
                self.kept = weights(self)
                return loss * math.nan
            return loss

    model = Broken()
    plugin = PLUGINS[name]() if name in PLUGINS else HalfstepPrecision(name)
    with pytest.raises(NonFiniteError, match="the loss is nan") as caught:
        fit(plugin, model)
    assert caught.value.cause == "forward"
    assert same(weights(model), model.kept)
    _, first, to_do, typed = str(caught.value).splitlines()
    assert first.startswith("first cause: literal not finite: aten.mul.Tensor in fp")
    assert to_do.startswith("to do: replace the literal")
    assert typed == "try: print(error.first_cause)"


def test_the_row_that_breaks_a_batch_is_named():
    data = batches()
    data.tensors[0][BATCH + 2, 0] = math.nan
    run = trainer(HalfstepPrecision("bf16-mixed"))
    with pytest.raises(NonFiniteError, match="; sample 2\n") as caught:
        run.fit(Regression(), DataLoader(data, batch_size=BATCH))
    assert caught.value.first_cause.samples == (2,)
    assert caught.value.first_cause.cause_class == "data not finite"
    assert f"at {__file__}:" in str(caught.value)


def test_an_overflow_that_fp32_has_not_says_so():
    class Large(Regression):
        def training_step(self, batch, index):
            inputs, targets = batch
            return mse(self.net(inputs * (1.0 if index < OVERFLOW else 1e5)), targets)

    with pytest.raises(NonFiniteError, match="or train in bf16-mixed") as caught:
        fit(HalfstepPrecision("fp16-mixed"), Large())
    assert caught.value.first_cause.fits_fp32


def test_no_step_where_training_step_gives_none():
    class Idle(Regression):
        def training_step(self, batch, index):
            return None if index == 1 else super().training_step(batch, index)

    model, plugin, watcher = Idle(schedule=True), HalfstepPrecision("fp16-master"), Watcher()
    with pytest.warns(UserWarning, match="returned `None`"):
        fit(plugin, model, callbacks=[watcher])
    same_as_before = [identical(*pair) for pair in zip(watcher.before, watcher.after, strict=True)]
    assert same_as_before == [index == 1 for index in range(BATCHES)]
    assert model.rates[-1] == 0.01 * 0.5 ** (BATCHES - 1)


# Checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PLUGINS, "bf16-master", "bf16-split", "bf16-kahan",
                                  "bf16-split,moments=8bit"])  # fmt: skip
def test_a_resumed_run_is_the_same_run_bit_for_bit(name, tmp_path):
    def plugin():
        return PLUGINS[name]() if name in PLUGINS else HalfstepPrecision(name)

    def module():
        return Regression(schedule=True, bad=(OVERFLOW,) if name in PLUGINS else ())

    whole_plugin, half_plugin, rest_plugin = plugin(), plugin(), plugin()
    whole, _ = fit(whole_plugin, module(), max_epochs=2)
    _, run = fit(half_plugin, module())
    path = tmp_path / "half.ckpt"
    run.save_checkpoint(path)
    rest, second = module(), trainer(rest_plugin, max_epochs=2)
    second.fit(rest, loader(), ckpt_path=path, weights_only=True)
    assert second.global_step == 2 * BATCHES
    assert same(weights(rest), weights(whole))
    assert rest.rates == whole.rates[BATCHES:]
    assert rest_plugin.last_step.loss == whole_plugin.last_step.loss
    assert rest_plugin.last_step.skipped_total == whole_plugin.last_step.skipped_total
    assert rest_plugin.state_dict() == whole_plugin.state_dict()


# Evaluation -----------------------------------------------------------------------------------


class Evaluated(Regression):
    def validation_step(self, batch, index):
        inputs, targets = batch
        output = self.net(inputs)
        self.outputs.append((output.dtype, self.net[0].weight.dtype))
        self.log("mse", nn.functional.mse_loss(output, targets))


def test_a_model_that_is_only_evaluated_gets_its_weights_back():
    model = Evaluated()
    start = weights(model)
    found = trainer(HalfstepPrecision("bf16-master")).validate(model, loader(), verbose=False)
    assert set(model.outputs) == {(torch.float32, torch.bfloat16)}
    assert same(weights(model), start)
    assert model(torch.ones(1, WIDTH)).dtype == torch.float32
    plain = trainer(None).validate(model, loader(), verbose=False)
    # bf16 keeps 8 bits: a percent of the loss, and not the same number
    assert found[0]["mse"] == pytest.approx(plain[0]["mse"], rel=0.05)
    assert found != plain


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-master", "bf16-split"])
def test_a_module_may_be_fitted_again_by_the_same_trainer_and_by_others(policy):
    model = Regression()
    run = trainer(HalfstepPrecision(policy))
    run.fit(model, loader())
    hooks = [h for m in model.modules() for h in (*m._forward_pre_hooks, *m._forward_hooks)]
    assert hooks == []
    seen = [weights(model)]
    run.fit_loop.max_epochs = 2
    run.fit(model, loader())
    seen.append(weights(model))
    for error in (RuntimeError("x"), KeyboardInterrupt()):
        breaking = trainer(HalfstepPrecision(policy), callbacks=[Breaking(error)])
        with pytest.raises((RuntimeError, SystemExit)):  # Lightning exits after Ctrl-C
            breaking.fit(model, loader())
        seen.append(weights(model))
    fit(HalfstepPrecision(policy), model)
    seen.append(weights(model))
    assert not any(same(a, b) for a, b in itertools.pairwise(seen))


class Breaking(pl.Callback):
    """Raises an error in the middle of the first epoch."""

    def __init__(self, error):
        self.error = error

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == 3:
            raise self.error


class Searched(Regression):
    lr, batch_size = 0.1, BATCH

    def train_dataloader(self):
        return loader(self.batch_size)


@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size"])
def test_a_search_is_refused_before_it_rounds_the_weights(search, tmp_path):
    model = Searched()
    before = weights(model)
    tuner = Tuner(trainer(HalfstepPrecision("bf16-master"), default_root_dir=tmp_path))
    with pytest.raises(PrecisionError, match=r"Search with .*HalfstepPrecision\('bf16-mixed'\)"):
        getattr(tuner, search)(model)
    assert same(weights(model), before)
    tuner = Tuner(trainer(HalfstepPrecision("bf16-mixed"), default_root_dir=tmp_path))
    assert tuner.lr_find(model, num_training=4) is not None
    assert same(weights(model), before)


# Refusals -------------------------------------------------------------------------------------


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(ConfigError, match="the Trainer has Precision"):
        fit(None, callbacks=[StepLog()])
    with pytest.raises(PrecisionError, match="has no model yet"), \
            HalfstepPrecision("fp32").forward_context():  # fmt: skip
        pass


# The scaler -----------------------------------------------------------------------------------


def test_sharding_strategies_are_refused_by_name():
    class Stub:
        strategy = FSDPStrategy.__new__(FSDPStrategy)

    model = Regression()
    model._trainer = Stub()
    with pytest.raises(PrecisionError, match="FSDPStrategy shards weights"):
        HalfstepPrecision("bf16-mixed").connect(model, [], [])


# The log --------------------------------------------------------------------------------------


class Memory(pl.loggers.logger.Logger):
    name, version = "memory", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


@pytest.mark.parametrize("name", PLUGINS)
def test_the_log_tells_what_every_step_did(name, caplog):
    plugin, memory = PLUGINS[name](), Memory()
    model = Regression(bad=(OVERFLOW,))
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit(plugin, model, logger=memory, log_every_n_steps=1, callbacks=[StepLog()],
            accumulate_grad_batches=2)  # fmt: skip
    rows = [r for r in memory.rows if "halfstep/skipped" in r]
    assert [r["halfstep/skipped"] for r in rows] == [0.0, 1.0, 0.0]  # of batches 2 and 3
    assert [r["halfstep/skipped_total"] for r in rows] == [0.0, 1.0, 1.0]
    assert [r["halfstep/loss_scale"] for r in rows] == [2.0**16, 2.0**15, 2.0**15]
    assert [math.isfinite(r["halfstep/grad_norm"]) for r in rows] == [True, False, True]
    said = [r.message for r in caplog.records if "skipped" in r.message]
    assert len(said) == 1
    assert "step 2 skipped, overflow in the gradients of net.0.weight" in said[0]


# Parts ----------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("policy", ["fp16-mixed", "fp16-master"])
def test_two_ddp_processes_step_and_skip_together(tmp_path, policy):
    class OneRankOverflows(Regression):
        def training_step(self, batch, index):
            self.bad = (OVERFLOW,) if self.global_rank == 1 else ()
            return super().training_step(batch, index)

        def on_train_end(self):
            assert set(self.outputs) == {torch.float32}
            step = self.trainer.precision_plugin.last_step
            path = tmp_path / f"{self.global_rank}.pt"
            torch.save([weights(self), step.skipped_total, step.next_loss_scale, self.rates], path)

    plugin = HalfstepPrecision(policy)
    with warnings.catch_warnings():
        # torch tells of a fork in a process with threads; nothing here runs in them
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork")
        run = trainer(plugin, strategy=DDPStrategy(start_method="fork"), devices=2)
        run.fit(OneRankOverflows(schedule=True), loader(BATCH // 2))
    first, second = (torch.load(tmp_path / f"{i}.pt", weights_only=True) for i in range(2))
    assert same(first[0], second[0])
    assert first[1:] == second[1:]
    assert first[1] == 1
    assert not same(first[0], weights(Regression()))
