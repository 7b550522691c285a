"""Lightning's own demos, under its Trainer and the precision plugin of halfstep."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, ManualOptimBoringModel
from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from halfstep.integrations.lightning import HalfstepPrecision
from strangers.packages.runs import STEPS, Program, Run, lines_changed

WORDS, LENGTH, ROWS = 64, 12, 4


def text_loader() -> DataLoader:
    """Words and the words that follow; the demos would fetch WikiText."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (3 * ROWS, LENGTH + 1), generator=draw)
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:].contiguous()), batch_size=ROWS)


def vector_loader() -> DataLoader:
    draw = torch.Generator().manual_seed(0)
    return DataLoader(torch.randn(3 * ROWS, 32, generator=draw), batch_size=ROWS)


def small_transformer() -> LightningModule:
    """The demo with a small network in place of its own, and no dropout."""
    module = LightningTransformer(vocab_size=WORDS)
    module.model = Transformer(WORDS, ninp=16, nhead=2, nhid=16, nlayers=1, dropout=0.0)
    return module


def small_lstm() -> LightningModule:
    module = LightningLSTM(vocab_size=WORDS)
    module.model = SimpleLSTM(WORDS, ninp=16, nhid=16, nlayers=2, dropout=0.0)
    return module


def recorded(module: LightningModule) -> list[float]:
    """The list to which the losses of the module's ``training_step`` will be added."""
    losses: list[float] = []
    original = module.training_step

    def training_step(*args, **kwargs):
        given = original(*args, **kwargs)
        loss = given["loss"] if isinstance(given, dict) else given
        losses.append(loss.item())
        return given

    module.training_step = training_step
    return losses


def fetch_nothing() -> None:
    """The demos' ``prepare_data`` would fetch WikiText."""


def plain(module, loader, options):
    trainer = Trainer(**options)
    trainer.fit(module, loader)


def mixed(policy, module, loader, options):
    trainer = Trainer(plugins=[HalfstepPrecision(policy)], **options)
    trainer.fit(module, loader)


def sgd(module, lr):
    return torch.optim.SGD(module.parameters(), lr=lr)


def own_sgd(module, lr):
    return halfstep.optim.SGD(module.parameters(), lr=lr)


def train(run: Run, make, loader, lr: float) -> list[float]:
    torch.manual_seed(0)
    module = run.begin(make())
    choose = sgd
    if run.policy is not None and halfstep.parse_policy(run.policy).needs_own_optimizer:
        choose = own_sgd
    # the demos' configure_optimizers, with a schedule or Adam, differ in the optimizer's class only
    module.configure_optimizers = lambda: choose(module, lr * run.rate)
    module.prepare_data = fetch_nothing
    losses = recorded(module)
    options = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "max_steps": STEPS,
        "limit_val_batches": 0,
    }  # fmt: skip
    if run.policy is None:
        plain(module, loader(), options)
    else:
        mixed(run.policy, module, loader(), options)
    return losses


def lines(policy: str) -> tuple[int, int]:
    own = halfstep.parse_policy(policy).needs_own_optimizer
    changed = [lines_changed(plain, mixed), lines_changed(sgd, own_sgd)]
    added, removed = (sum(part) for part in zip(*changed[: 1 + own], strict=True))
    return added + 1 + own, removed  # and the imports


def made(name, model, loader, lr) -> Program:
    return Program(name, "lightning", lambda run: train(run, model, loader, lr), lines)


PROGRAMS = [
    made("BoringModel", BoringModel, vector_loader, 0.1),
    made("ManualOptimBoringModel", ManualOptimBoringModel, vector_loader, 0.1),
    made("DemoModel", DemoModel, vector_loader, 0.02),
    made("LightningTransformer", small_transformer, text_loader, 0.1),
    made("LightningLSTM", small_lstm, text_loader, 5.0),
]
