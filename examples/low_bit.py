"""Which recipe below 16 bits? One batch's gradient tells much before anybody trains.

Look at how far each recipe's gradient is from that of fp32: NVFP4 is further off than MXFP8, and
most of that comes from the first block. Then at the mean of 16 backward passes: what stochastic
rounding adds averages away in part, and what rounding to nearest adds does not. The rows "backward"
leave the forward product in bf16.

Run: python examples/low_bit.py [--out FOLDER]
"""

import argparse
from pathlib import Path

import torch

import halfstep
from halfstep.trainer.models.gpt.gpt import GPT, GPTConfig

LENGTH, DRAWS = 64, 16
SHAPE = GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=LENGTH, vocab_size=256)
RECIPES = {
    "bf16-mixed": "bf16-mixed",
    "mxfp8": "mxfp8,simulate=yes",
    "mxfp8-e5m2": "bf16-mixed,simulate=yes,recipe=mxfp8-e5m2",
    "nvfp4": "nvfp4,simulate=yes",
    "nvfp4, to nearest": "bf16-mixed,simulate=yes,recipe=nvfp4-nearest",
    "nvfp4, no Hadamard": "bf16-mixed,simulate=yes,recipe=nvfp4-unmixed",
    "nvfp4, block 0 in bf16": "nvfp4,simulate=yes,keep_bf16=layers.0*",
    "backward": "bf16-mixed,simulate=yes,recipe=bf16/nvfp4/nvfp4",
    "backward, to nearest": "bf16-mixed,simulate=yes,recipe=bf16/nvfp4-nearest/nvfp4-nearest",
    "backward, no Hadamard": "bf16-mixed,simulate=yes,recipe=bf16/nvfp4-unmixed/nvfp4-unmixed",
}
PRODUCTS = {"fprop": "nvfp4/bf16/bf16", "dgrad": "bf16/nvfp4/bf16", "wgrad": "bf16/bf16/nvfp4"}
LINEARS = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")
LAYERS = [f"layers.{b}.{name}" for b in range(SHAPE.n_layer) for name in LINEARS]
COLOURS = ("#0072B2", "#E69F00")  # https://jfly.uni-koeln.de/color, for colour-blind readers too


def rows(text: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - LENGTH, (count, 1))
    places = starts + torch.arange(LENGTH)
    return text[places], text[places + 1]


def loss_of(model: GPT, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model.loss_sum(batch)[0] / batch[1].numel()


def train(steps: int) -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    """Train in fp32 until the blocks do something; return the model and one more batch."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # a file that everybody has
    model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20)
        loss_of(model, rows(text, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, rows(text, 16)


def gradients(policy: str, model: GPT, batch: tuple, draws: int) -> list[torch.Tensor]:
    """The gradient of the blocks, as one vector, ``draws`` times with other random bits."""
    precision = halfstep.Precision(policy, model, torch.optim.SGD(model.parameters()))
    found = []
    for _ in range(draws):
        with precision.autocast():
            loss = loss_of(model, batch)
        precision.backward(loss)
        found.append(torch.cat([p.grad.flatten() for p in model.layers.parameters()]).double())
        precision.discard()
    precision.close()
    return found


def measure(model: GPT, batch: tuple) -> tuple[dict, dict]:
    """Errors relative to the gradient's norm: by recipe (one draw, mean of all), by product."""
    (truth,) = gradients("fp32", model, batch, 1)

    def error(found: torch.Tensor) -> float:
        return float((found - truth).norm() / truth.norm())

    by_recipe, by_layer = {}, {}
    for name, policy in RECIPES.items():
        found = gradients(policy, model, batch, DRAWS)
        by_recipe[name] = error(found[0]), error(torch.stack(found).mean(0))
    for layer in LAYERS:
        policies = [f"bf16-mixed,simulate=yes,rules={layer}:{one}" for one in PRODUCTS.values()]
        by_layer[layer] = [error(gradients(p, model, batch, 1)[0]) for p in policies]
    return by_recipe, by_layer


def pyplot():
    """Import pyplot, without a window; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: matplotlib is not installed; pip install 'halfstep[plot]'")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def draw(plt, by_recipe: dict, by_layer: dict, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.6), layout="constrained")
    for kind, label in enumerate(("one draw", f"mean of {DRAWS}")):
        values = [100 * errors[kind] for errors in by_recipe.values()]
        places = torch.arange(len(values)) + 0.4 * kind - 0.2
        bars = left.barh(places, values, height=0.38, color=COLOURS[kind], label=label)
        left.bar_label(bars, [f"{value:.1f}" for value in values], padding=3, fontsize=10)
    left.set_yticks(range(len(by_recipe)), list(by_recipe))
    left.invert_yaxis()
    left.set(xlabel="error of the gradient, per cent of its norm", title="By recipe")
    left.legend(frameon=False, loc="lower right")
    right.imshow(list(by_layer.values()), aspect="auto", cmap="Blues", norm="log")
    for y, row in enumerate(by_layer.values()):
        for x, e in enumerate(row):
            right.text(x, y, f"{e:.1%}", ha="center", va="center", color="w" if e > 0.025 else "k")
    right.set_xticks(range(len(PRODUCTS)), list(PRODUCTS))
    right.set_yticks(range(len(LAYERS)), [layer.removeprefix("layers.") for layer in LAYERS])
    right.set_title("One product of one layer in NVFP4")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    out = parser.parse_args().out
    by_recipe, by_layer = measure(*train(150))
    print(f"{'error of the gradient':<24} {'one draw':>9} {f'mean of {DRAWS}':>11}")
    for name, (one, mean) in by_recipe.items():
        print(f"{name:<24} {one:>9.2%} {mean:>11.2%}")
    print(f"\n{'nvfp4 in one product':<24}" + "".join(f"{name:>9}" for name in PRODUCTS))
    for layer, values in by_layer.items():
        print(f"{layer:<24}" + "".join(f"{value:>9.2%}" for value in values))
    plt = pyplot()
    if plt is not None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "low_bit.png"
        draw(plt, by_recipe, by_layer, path)
        print(f"figure: {path}")


if __name__ == "__main__":
    main()
