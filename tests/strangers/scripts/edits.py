"""What a user changes in each script to train it under halfstep, as pairs of old and new text.

Every old text stands exactly once in its script. ``policy`` in a new text is what a user would
write there as a string.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Edit = tuple[str, str]


@dataclass(frozen=True)
class Script:
    """A program and its edits.

    Attributes:
        module: Its file's name.
        edits: For any policy.
        own: For policies that need one of halfstep's optimizers, after ``edits``; empty where
            halfstep has none of that kind.
        watch: Not counted: they hand what is trained to ``prepare``, for control runs.
        argv: Arguments for its ``main``.
    """

    module: str
    edits: tuple[Edit, ...]
    own: tuple[Edit, ...]
    watch: tuple[Edit, ...]
    argv: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return (Path(__file__).parent / f"{self.module}.py").read_text(encoding="utf-8")

    def edited(self, own: bool = False) -> str:
        return apply(self.source, (*self.edits, *(self.own if own else ())))

    def lines_changed(self, own: bool = False) -> tuple[int, int]:
        """Lines that were added and taken out, as ``diff`` counts them."""
        lines = difflib.unified_diff(self.source.splitlines(), self.edited(own).splitlines(), n=0)
        signs = [line[0] for line in lines if not line.startswith(("---", "+++", "@@"))]
        return signs.count("+"), signs.count("-")


def apply(text: str, edits: Sequence[Edit]) -> str:
    for old, new in edits:
        count = text.count(old)
        assert count == 1, f"stands {count} times where it should stand once:\n{old}"
        text = text.replace(old, new)
    return text


MNIST = Script(
    "mnist",
    (
        ("import torch\nimport", "import halfstep\nimport torch\nimport"),
        ("train_loader, optimizer, epoch, losses):", "train_loader, precision, epoch, losses):"),
        (
            """\
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
""",
            """\
        with precision.autocast():
            output = model(data)
            loss = F.nll_loss(output, target)
        precision.step(loss)
""",
        ),
        ("def test(model,", "def test(precision, model,"),
        ("    with torch.no_grad():", "    with torch.no_grad(), precision.autocast():"),
        (
            "    scheduler = StepLR(",
            "    precision = halfstep.Precision(policy, model, optimizer)\n    scheduler = StepLR(",
        ),
        ("train_loader, optimizer, epoch, losses)\n", "train_loader, precision, epoch, losses)\n"),
        ("        test(model,", "        test(precision, model,"),
    ),
    (),  # Adadelta
    (("    model = Net().to(device)\n", "    model = Net().to(device)\n    prepare(model)\n"),),
)

VAE = Script(
    "vae",
    (
        ("import torch\nimport", "import halfstep\nimport torch\nimport"),
        (
            "    losses = []\n",
            "    precision = halfstep.Precision(policy, model, optimizer)\n    losses = []\n",
        ),
        (
            """\
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
""",
            """\
            with precision.autocast():
                recon_batch, mu, logvar = model(data)
                loss = loss_function(recon_batch, data, mu, logvar)
            precision.backward(loss)
""",
        ),
        ("            optimizer.step()", "            precision.step()"),
        (
            "        with torch.no_grad():\n            for",
            "        with torch.no_grad(), precision.autocast():\n            for",
        ),
        (
            "        with torch.no_grad():\n            sample",
            "        with torch.no_grad(), precision.autocast():\n            sample",
        ),
    ),
    (
        (
            "optim.Adam(model.parameters(), lr=1e-3)",
            "halfstep.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)",
        ),
    ),
    (("    model = VAE().to(device)\n", "    model = VAE().to(device)\n    prepare(model)\n"),),
)

DCGAN = Script(
    "dcgan",
    (
        ("import torch\nfrom", "import halfstep\nimport torch\nfrom"),
        (
            "    losses = []\n",
            "    precisionD = halfstep.Precision(policy, netD, optimizerD)\n"
            "    precisionG = halfstep.Precision(policy, netG, optimizerG)\n"
            "    losses = []\n",
        ),
        (
            """\
            output = netD(real)
            errD_real = criterion(output, label)
            errD_real.backward()
""",
            """\
            with precisionD.autocast():
                output = netD(real)
                errD_real = criterion(output, label)
            precisionD.backward(errD_real)
""",
        ),
        (
            "            fake = netG(noise)\n",
            "            with precisionG.autocast():\n                fake = netG(noise)\n",
        ),
        (
            """\
            output = netD(fake.detach())
            errD_fake = criterion(output, label)
            errD_fake.backward()
""",
            """\
            with precisionD.autocast():
                output = netD(fake.detach())
                errD_fake = criterion(output, label)
            precisionD.backward(errD_fake)
""",
        ),
        ("optimizerD.step()", "precisionD.step()"),
        (
            """\
            output = netD(fake)
            errG = criterion(output, label)
            errG.backward()
""",
            """\
            with precisionD.autocast():
                output = netD(fake)
                errG = criterion(output, label)
            precisionG.backward(errG)
""",
        ),
        ("optimizerG.step()", "precisionG.step()"),
        (
            "        fake = netG(fixed_noise)\n",
            "        with precisionG.autocast():\n            fake = netG(fixed_noise)\n",
        ),
    ),
    tuple(
        (
            f"optimizer{net} = optim.Adam(net{net}.parameters(), lr=opt.lr,"
            " betas=(opt.beta1, 0.999))",
            f"optimizer{net} = halfstep.optim.AdamW(\n        net{net}.parameters(), lr=opt.lr,"
            " betas=(opt.beta1, 0.999), weight_decay=0\n    )",
        )
        for net in "DG"
    ),
    (
        (
            "    criterion = nn.BCELoss()\n",
            "    criterion = nn.BCELoss()\n    prepare(netG)\n    prepare(netD)\n",
        ),
    ),
)

IMAGENET = Script(
    "imagenet",
    (
        ("import torch\nimport", "import halfstep\nimport torch\nimport"),
        (
            "criterion, optimizer, epoch, device, args):",
            "criterion, precision, epoch, device, args):",
        ),
        (
            """\
        output = model(images)
        loss = criterion(output, target)

""",
            """\
        with precision.autocast():
            output = model(images)
            loss = criterion(output, target)

""",
        ),
        (
            """\
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
            """\
        precision.step(loss)
""",
        ),
        (
            "def validate(val_loader, model, criterion):",
            "def validate(val_loader, model, criterion, precision):",
        ),
        (
            "    with torch.no_grad():\n        for images",
            "    with torch.no_grad(), precision.autocast():\n        for images",
        ),
        (
            "    scheduler = StepLR(",
            "    precision = halfstep.Precision(policy, model, optimizer)\n    scheduler = StepLR(",
        ),
        (
            '        scheduler.load_state_dict(checkpoint["scheduler"])\n',
            '        scheduler.load_state_dict(checkpoint["scheduler"])\n'
            '        precision.load_state_dict(checkpoint["precision"])\n',
        ),
        (
            "criterion, optimizer, epoch, device, args)\n",
            "criterion, precision, epoch, device, args)\n",
        ),
        (
            "= validate(val_loader, model, criterion)",
            "= validate(val_loader, model, criterion, precision)",
        ),
        (
            '                "scheduler": scheduler.state_dict(),\n',
            '                "scheduler": scheduler.state_dict(),\n'
            '                "precision": precision.state_dict(),\n',
        ),
    ),
    (("torch.optim.SGD(", "halfstep.optim.SGD("),),
    (("    model.to(device)\n", "    model.to(device)\n    prepare(model)\n"),),
)

WORDS_EDITS = (
    ("import torch\nimport", "import halfstep\nimport torch\nimport"),
    (
        "    criterion = nn.NLLLoss()\n",
        "    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)\n"
        "    precision = halfstep.Precision(policy, model, optimizer)\n"
        "    criterion = nn.NLLLoss()\n",
    ),
    ("        with torch.no_grad():", "        with torch.no_grad(), precision.autocast():"),
    (
        """\
            if args.model == "Transformer":
                output = model(data)
                output = output.view(-1, ntokens)
            else:
                hidden = repackage_hidden(hidden)
                output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
""",
        """\
            with precision.autocast():
                if args.model == "Transformer":
                    output = model(data)
                    output = output.view(-1, ntokens)
                else:
                    hidden = repackage_hidden(hidden)
                    output, hidden = model(data, hidden)
                loss = criterion(output, targets)
            precision.backward(loss)
""",
    ),
    (
        """\
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
""",
        """\
            optimizer.param_groups[0]["lr"] = lr
            precision.step()
""",
    ),
)
WORDS_OWN = (("torch.optim.SGD(", "halfstep.optim.SGD("),)
WORDS_WATCH = (
    ("    criterion = nn.NLLLoss()\n", "    criterion = nn.NLLLoss()\n    prepare(model)\n"),
)
LSTM = Script("word_language_model", WORDS_EDITS, WORDS_OWN, WORDS_WATCH)
TRANSFORMER = Script(
    "word_language_model",
    WORDS_EDITS,
    WORDS_OWN,
    WORDS_WATCH,
    ("--model", "Transformer", "--lr", "1"),
)

GCN = Script(
    "gcn",
    (
        ("import torch\nimport", "import halfstep\nimport torch\nimport"),
        ("def train_iter(epoch, model, optimizer,", "def train_iter(epoch, model, precision,"),
        (
            """\
    optimizer.zero_grad()
    output = model(*input)
    loss = criterion(output[mask_train], target[mask_train])
    loss.backward()
    optimizer.step()

    loss_train, acc_train = test(model, criterion, input, target, mask_train)
    loss_val, acc_val = test(model, criterion, input, target, mask_val)
""",
            """\
    with precision.autocast():
        output = model(*input)
        loss = criterion(output[mask_train], target[mask_train])
    precision.step(loss)

    with precision.autocast():
        loss_train, acc_train = test(model, criterion, input, target, mask_train)
        loss_val, acc_val = test(model, criterion, input, target, mask_val)
""",
        ),
        (
            "    criterion = nn.NLLLoss()\n",
            "    precision = halfstep.Precision(policy, gcn, optimizer)\n"
            "    criterion = nn.NLLLoss()\n",
        ),
        ("            epoch, gcn, optimizer,", "            epoch, gcn, precision,"),
        (
            "    loss_test, acc_test = test(",
            "    with precision.autocast():\n        loss_test, acc_test = test(",
        ),
    ),
    (),  # Adam with weight decay in the gradient
    (("    optimizer = Adam(", "    prepare(gcn)\n    optimizer = Adam("),),
)

NANOGPT = Script(
    "nanogpt",
    (
        ("import torch\nfrom", "import halfstep\nimport torch\nfrom"),
        (
            """\
    if init_from == "resume":
        optimizer.load_state_dict(checkpoint["optimizer"])
""",
            """\
    precision = halfstep.Precision(policy, model, optimizer)
    if init_from == "resume":
        optimizer.load_state_dict(checkpoint["optimizer"])
        precision.load_state_dict(checkpoint["precision"])
""",
        ),
        (
            "                _, loss = model(X, Y)\n                losses",
            "                with precision.autocast():\n"
            "                    _, loss = model(X, Y)\n                losses",
        ),
        (
            '                        "optimizer": optimizer.state_dict(),\n',
            '                        "optimizer": optimizer.state_dict(),\n'
            '                        "precision": precision.state_dict(),\n',
        ),
        (
            """\
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
""",
            """\
            with precision.autocast():
                _, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
""",
        ),
        ("            loss.backward()", "            precision.backward(loss)"),
        (
            "        optimizer.step()\n        optimizer.zero_grad(set_to_none=True)\n",
            "        precision.step()\n",
        ),
        (
            "    print(model.generate(",
            "    with precision.autocast():\n        print(model.generate(",
        ),
    ),
    (("return torch.optim.AdamW(", "return halfstep.optim.AdamW("),),
    (
        (
            '    if init_from == "scratch":\n        model = GPT(GPTConfig(**model_args))\n',
            '    if init_from == "scratch":\n        model = GPT(GPTConfig(**model_args))\n'
            "        prepare(model)\n",
        ),
        (
            '        model.load_state_dict(checkpoint["model"])\n',
            '        prepare(model)\n        model.load_state_dict(checkpoint["model"])\n',
        ),
    ),
)

SCRIPTS = {
    "mnist": MNIST,
    "vae": VAE,
    "dcgan": DCGAN,
    "imagenet": IMAGENET,
    "word_language_model LSTM": LSTM,
    "word_language_model Transformer": TRANSFORMER,
    "gcn": GCN,
    "nanogpt": NANOGPT,
}
