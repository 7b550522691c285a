"""What training scripts do between the four lines of a tutorial."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strangers.loops import HalfLoop, Idiom, Kit, Loop, flat

IDIOMS: dict[str, Idiom] = {}
STEPS = 6


def idiom(function: Idiom) -> Idiom:
    IDIOMS[function.__name__] = function
    return function


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def data(number: int) -> tuple[Tensor, Tensor]:
    """A batch of a smooth function; the same one for the same number."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 + number))
    return x, torch.stack([x[:, :4].sum(1).sin(), x[:, 4:].prod(1)], 1)


def loss_of(model: nn.Module, number: int) -> Tensor:
    x, y = data(number)
    return F.mse_loss(model(x), y)


def back(loop: Loop, number: int, weight: float = 1.0) -> Tensor:
    with loop.autocast():
        loss = loss_of(loop.model, number) * weight
    loop.backward(loss)
    return loss


def usual(kit: Kit) -> Loop:
    model = mlp()
    return kit.take(model, kit.sgd(model.parameters()))


def train(loop: Loop, numbers: Iterable[int] = range(STEPS)) -> None:
    for number in numbers:
        back(loop, number)
        loop.step()


def by_loss(loss_of_model: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """An idiom: the usual loop, with a loss of its own."""

    def run(kit: Kit) -> None:
        loop = usual(kit)
        for number in range(STEPS):
            with loop.autocast():
                loss = loss_of_model(loop.model, *data(number))
            loop.backward(loss)
            loop.step()

    IDIOMS[loss_of_model.__name__] = run
    return loss_of_model


def pattern(like: Tensor) -> Tensor:
    """0 and 1 in turn."""
    return (torch.arange(like.numel()) % 2).view_as(like).to(like.dtype)


# --- gradients ------------------------------------------------------------------------------------


@idiom
def plain(kit: Kit) -> None:
    train(usual(kit))


@idiom
def accumulate(kit: Kit) -> None:
    loop = usual(kit)
    for number in range(STEPS):
        for part in range(3):
            back(loop, 3 * number + part, 1 / 3)
        loop.step()


@idiom
def clip_by_argument(kit: Kit) -> None:
    loop = usual(kit)
    for number in range(STEPS):
        back(loop, number)
        loop.step(max_norm=0.2)


@idiom
def hook_from_before_that_clips(kit: Kit) -> None:
    model = mlp()
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.02, 0.02))
    train(kit.take(model, kit.sgd(model.parameters())))


@by_loss
def gradient_reversal(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    hidden = model[1](model[0](x))
    hidden.register_hook(lambda g: -0.5 * g)
    return F.mse_loss(model[2](hidden).float(), y)


# --- what is dropped, repeated, or added up -------------------------------------------------------


@idiom
def sharpness_aware(kit: Kit) -> None:
    """SAM: climb, take the gradient there, come back, step."""
    loop = usual(kit)
    for number in range(STEPS):
        back(loop, number)
        parameters = [*loop.model.parameters()]
        norm = torch.stack([p.grad.float().norm() for p in parameters]).norm()
        old = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.add_(0.05 * p.grad / norm)
        loop.optimizers[0].zero_grad()
        back(loop, number)
        with torch.no_grad():
            for p, value in zip(parameters, old, strict=True):
                p.copy_(value)
        loop.step()


# --- weights --------------------------------------------------------------------------------------


@idiom
def averaged_model(kit: Kit) -> None:
    loop = usual(kit)
    # torch's other way, a fused kernel, takes no average of another dtype than the weights'
    rule = torch.optim.swa_utils.get_swa_avg_fn()
    average = torch.optim.swa_utils.AveragedModel(loop.model, avg_fn=rule)
    for number in range(STEPS):
        back(loop, number)
        loop.step()
        average.update_parameters(loop.model)
    kit.trained.append(average.module)
    kit.start.append(kit.start[0])


# --- several models -------------------------------------------------------------------------------


@idiom
def gan_without_zero_grad(kit: Kit) -> None:
    """What the maker's loss left in the judge's gradients counts in its next step, as in torch."""
    gan(kit, clears=False)


@idiom
def gan(kit: Kit, clears: bool = True) -> None:
    """zero_grad, D step, zero_grad, G step, as in every DCGAN."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    make = kit.take(maker, kit.sgd(maker.parameters(), momentum=0.0))
    doubt = kit.take(judge, kit.sgd(judge.parameters(), momentum=0.0))
    for number in range(STEPS):
        real, _ = data(number)
        noise = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        if clears:
            judge.zero_grad()
        with doubt.autocast():
            fresh = maker(noise)
            real_score, fake_score = judge(real), judge(fresh.detach())
            loss_real = F.binary_cross_entropy_with_logits(real_score, torch.ones(16, 1))
            loss_fake = F.binary_cross_entropy_with_logits(fake_score, torch.zeros(16, 1))
        doubt.backward(loss_real)
        doubt.backward(loss_fake)
        doubt.step()
        if clears:
            maker.zero_grad()
        with make.autocast():
            score = judge(maker(noise))
            loss = F.binary_cross_entropy_with_logits(score, torch.ones(16, 1))
        make.backward(loss)
        make.step()


# --- kinds of modules -----------------------------------------------------------------------------


@idiom
def sparse_embedding(kit: Kit) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(11, 8, sparse=True))
    loop = kit.take(model, kit.sgd(model.parameters(), lr=4.0, momentum=0.0))
    for number in range(STEPS):
        ids = torch.randint(11, (16, 4), generator=torch.Generator().manual_seed(number))
        with loop.autocast():
            loss = F.mse_loss(model(ids), torch.ones(16, 8))
        loop.backward(loss)
        loop.step()


# --- the same, as others write it -----------------------------------------------------------------


@idiom
def hook_that_takes_gradients_away(kit: Kit) -> None:
    """As offloading does: each is moved out when it has arrived, and back before the step."""
    loop = usual(kit)
    away: dict[Tensor, Tensor] = {}

    def take(p: Tensor) -> None:
        away[p] = away.get(p, 0) + p.grad.float()
        p.grad = None

    for p in loop.model.parameters():
        p.register_post_accumulate_grad_hook(take)
    for number in range(STEPS):
        back(loop, number, 0.5)
        back(loop, number + 1, 0.5)
        for p, gradient in away.items():
            p.grad = gradient
        away.clear()
        loop.step()


@idiom
def hooks_of_the_optimizer(kit: Kit) -> None:
    loop = usual(kit)
    held = [*loop.model.parameters()]

    @torch.no_grad()
    def decay(*_: object) -> None:
        for p in held:
            p.mul_(0.98)

    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    loop.optimizers[0].register_step_pre_hook(halve)
    loop.optimizers[0].register_step_post_hook(decay)
    train(loop)


# --- gradients of what is not the model -----------------------------------------------------------


@idiom
def plain_optimizer_beside(kit: Kit) -> None:
    """A module in front that an optimizer of torch trains, stepped by hand."""
    front, model = nn.Linear(8, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 2))
    front.load_state_dict(mlp()[0].state_dict())
    loop = kit.take(model, kit.sgd(model.parameters()))
    kit.trained.append(front)
    kit.start.append(flat(front))
    other = torch.optim.SGD(front.parameters(), lr=0.1)
    for number in range(STEPS):
        x, y = data(number)
        other.zero_grad()
        with loop.autocast():
            loss = F.mse_loss(model(front(x)), y)
        loop.backward(loss)
        other.step()
        loop.step()


# --- research -------------------------------------------------------------------------------------


@idiom
def gradients_per_sample(kit: Kit) -> None:
    """DP-SGD by vmap: each sample's gradient is clipped before they are averaged."""
    loop = usual(kit)
    for number in range(STEPS):
        x, y = data(number)
        back(loop, number)
        held = {name: p.detach() for name, p in loop.model.named_parameters()}

        def one(weights: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
            out = torch.func.functional_call(loop.model, weights, (a[None],))
            return F.mse_loss(out, b[None])

        with loop.autocast():
            each = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(held, x, y)
        norms = torch.stack([g.float().flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        share = (0.5 / (norms + 1e-3)).clamp(max=1) / 16
        for name, p in loop.model.named_parameters():
            p.grad.copy_(torch.einsum("b,b...->...", share, each[name].float()))
        loop.step()


@by_loss
def inner_loop(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """MAML: through one step of gradient descent."""
    held = dict(model.named_parameters())
    first = F.mse_loss(torch.func.functional_call(model, held, (x[:8],)), y[:8])
    slopes = torch.autograd.grad(first, [*held.values()], create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(held.items(), slopes, strict=True)}
    return F.mse_loss(torch.func.functional_call(model, fast, (x[8:],)), y[8:])


# --- changes of model, optimizer and schedule -----------------------------------------------------


@idiom
def weights_tied_on_the_way(kit: Kit) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    loop = kit.take(model, kit.sgd(model.parameters(), lr=0.05))
    for number in range(STEPS):
        if number == 2:
            model[2].weight = model[0].weight
            kit.start[-1] = flat(model)
        back(loop, number)
        loop.step()


@idiom
def optimizer_exchanged_on_the_way(kit: Kit) -> None:
    loop = usual(kit)
    for number in range(STEPS):
        if number == 3:
            if isinstance(loop, HalfLoop):
                loop.precision.close()
            start, model = kit.start.pop(), kit.trained.pop()
            loop = kit.take(model, kit.sgd(model.parameters(), lr=0.02, nesterov=True))
            kit.start[-1] = start
        back(loop, number)
        loop.step()


# --- slips ----------------------------------------------------------------------------------------


@idiom
def backward_of_the_loss_itself(kit: Kit) -> None:
    loop = usual(kit)
    for number in range(STEPS):
        with loop.autocast():
            loss = loss_of(loop.model, number)
        loss.backward()
        loop.step()


@idiom
def losses_weights_that_are_not_the_models(kit: Kit) -> None:
    model, weights = mlp(), nn.Parameter(torch.zeros(2))
    loop = kit.take(model, kit.sgd([*model.parameters(), weights]))
    for number in range(STEPS):
        x, y = data(number)
        with loop.autocast():
            each = (model(x) - y).square().mean(0)
            loss = (each * torch.exp(-weights) + weights).sum()
        loop.backward(loss)
        loop.step()
