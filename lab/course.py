"""What the experiments share: two languages, the figure, and a small transformer to train."""

import argparse
import io
import json
import logging
import sys
import warnings
from pathlib import Path
from pydoc_data import topics

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

from halfstep import Precision
from halfstep.optim import AdamW

# Okabe and Ito's palette, which colour-blind readers can tell apart: https://jfly.uni-koeln.de/color
BLACK, BLUE, ORANGE, GREEN, PINK, SKY = [
    "#000000",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
]
STYLE = {"font.size": 11.5, "axes.titlesize": 11.5, "axes.titlelocation": "left"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
STYLE["svg.fonttype"] = "none"  # text stays text, in the reader's fonts
STYLE["font.family"] = ["DejaVu Sans", "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei"]
logging.getLogger("matplotlib.font_manager").setLevel("ERROR")  # it says which fonts are missing


class Drawn(Figure):
    """A figure that the cell of a notebook shows."""

    def _repr_svg_(self):
        self.savefig(written := io.StringIO(), format="svg")
        return written.getvalue()


class Lab:
    """An experiment while it runs: its language, what it says, and where its figure goes."""

    def __init__(self, name, lang="en"):
        parser = argparse.ArgumentParser(prog=f"lab/{name}.py")
        parser.add_argument("--lang", choices=("en", "zh"), default=lang)
        parser.add_argument("--out", type=Path, help="a folder for the figure and the finding")
        parser.add_argument("--quick", action="store_true", help="a tiny form, for tests")
        given = parser.parse_args([] if "ipykernel" in sys.modules else None)
        self.name, self.lang, self.out, self.quick = name, given.lang, given.out, given.quick

    def say(self, en, zh):
        return zh if self.lang == "zh" else en

    def tell(self, en, zh):
        print(self.say(en, zh), flush=True)

    def table(self, *rows):
        """Print rows in columns; the first is the heading."""
        for row in rows:
            print("  ", *(f"{cell:<18}" for cell in row), flush=True)

    def finding(self, en, zh, **numbers):
        """Print the sentence that follows from the numbers; with --out both are kept, as JSON."""
        self.tell(f"\n{en}\n", f"\n{zh}\n")
        if self.out:
            self.out.mkdir(parents=True, exist_ok=True)
            kept = {"en": en, "zh": zh, "quick": self.quick, "numbers": numbers}
            text = json.dumps(kept, ensure_ascii=False, allow_nan=False, indent=1)
            (self.out / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")

    def figure(self, draw, width, height):
        """Draw into a file of --out in each language; the figure, for the cell of a notebook."""
        spoken = self.lang
        for lang in ("en", "zh") if self.out else (spoken,):
            self.lang = lang
            with matplotlib.rc_context({**STYLE, "svg.hashsalt": self.name}):
                draw(figure := Drawn(figsize=(width, height), layout="constrained"))
                if self.out:
                    path = self.out / f"{self.name}{'.zh' if lang == 'zh' else ''}.svg"
                    with warnings.catch_warnings(action="ignore"):  # letters that no font here has
                        figure.savefig(path, metadata={"Date": None})
                    print(path)
        self.lang = spoken
        return figure


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (sequences, positions, width)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        h = F.scaled_dot_product_attention(*qkv.unbind(2), is_causal=self.causal)
        x = x + self.proj(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A GPT over bytes; with classes an encoder like BERT, read at its first place."""

    def __init__(self, layers, width, length, vocabulary=256, classes=0, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        blocks = (Block(width, max(1, width // 32), not classes) for _ in range(layers))
        self.layers, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.head, self.classes = nn.Linear(width, classes or vocabulary, bias=False), classes
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids):  # (sequences, positions)
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0] if self.classes else x))

    def loss(self, batch):
        """The mean loss of a batch: of bytes and those that follow, or of texts and classes."""
        return F.cross_entropy(self(batch[0]).flatten(0, -2), batch[1].flatten())


def batches(sequences, length, seed, held_out=False):
    """Bytes of Python's manual from random places, without end; its last tenth is held out."""
    text = torch.tensor(bytearray("\n".join(topics.topics.values()).encode()))
    cut, generator = len(text) * 9 // 10, torch.Generator().manual_seed(seed)
    text = text[cut:] if held_out else text[:cut]
    while True:
        starts = torch.randint(len(text) - length, (sequences, 1), generator=generator)
        places = starts + torch.arange(length)
        yield text[places].long(), text[places + 1].long()


def train(policy, model, steps, lr, data, warmup=0):
    """Train under a policy: what each step did, and the precision while the model is in it."""
    optimizer = AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    with Precision(policy, model, optimizer, on_nonfinite="skip:1000000") as precision:
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = lr * min(1.0, step / max(warmup, 1))
            with precision.autocast():
                loss = model.loss(next(data))
            yield precision.step(loss, max_norm=1.0), precision
