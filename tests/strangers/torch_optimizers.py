"""torch's table of optimizers with ours in it: which of its configurations behave as torch's do?

``torch.testing._internal.common_optimizers.optim_db`` lists the arguments and errors that torch's
own suite tries for AdamW, SGD and Muon. This script tries each of them on torch's class
and on ours (Lion, which torch has not, on AdamW's), in the ways of that suite: does the loss fall,
is a state saved and loaded, do hooks fire, are errors raised, and so on. A case counts where ours
does what torch's does. It is a script and no test, as that module needs the package expecttest::

    python tests/strangers/torch_optimizers.py
"""

from __future__ import annotations

import copy
import io
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

from halfstep.optim import SGD, AdamW, Lion, Muon

Make = Callable[[Any], torch.optim.Optimizer]
INFO = {info.optim_cls.__name__: info for info in optim_db}
PAIRS = [
    ("AdamW", AdamW),
    ("SGD", SGD),
    ("Lion", Lion),
    ("Muon", Muon),
]


def problem(
    info: Any, contiguous: bool = True, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """A weight and a bias, which is a matrix of one column where the optimizer takes no vectors."""
    torch.manual_seed(0)
    shapes = [(10, 5), (10, 1) if info.optim_cls is torch.optim.Muon else (10,)]
    if contiguous:
        return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    return [nn.Parameter(torch.randn(*shape, 2, dtype=dtype)[..., 0]) for shape in shapes]


def loss_of(parameters: list[nn.Parameter]) -> Tensor:
    weight, bias = parameters
    x = torch.linspace(-1, 1, 5, dtype=weight.dtype)
    return (weight.mv(x) + bias.flatten()).abs().pow(2).sum()


def train(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 20, schedulers=()
) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(parameters)
        loss.backward()
        return loss

    for _ in range(steps):
        loss = optimizer.step(closure)
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(loss) if plateau else scheduler.step()


def through_a_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# --- the ways -----------------------------------------------------------------------------------


def right_direction(
    make: Make, info: Any, options: dict[str, Any], contiguous: bool, scheduled: bool
) -> None:
    for makers in info.scheduler_inputs if scheduled else [[]]:
        parameters = problem(info, contiguous)
        optimizer = make(parameters)
        before = float(loss_of(parameters))
        train(optimizer, parameters, schedulers=[maker(optimizer) for maker in makers])
        after = float(loss_of(parameters))
        assert (after > before) if options.get("maximize") else (after < before)


def groups(make: Make, info: Any, options: dict[str, Any]) -> None:
    parameters = problem(info)
    optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.01}])
    before = float(loss_of(parameters))
    train(optimizer, parameters)
    after = float(loss_of(parameters))
    assert (after > before) if options.get("maximize") else (after < before)


def complex_numbers(make: Make, info: Any, options: dict[str, Any]) -> None:
    parameters = problem(info, dtype=torch.complex64)
    train(make(parameters), parameters, 3)


def double(make: Make, info: Any, options: dict[str, Any]) -> None:
    parameters = problem(info, dtype=torch.float64)
    train(make(parameters), parameters, 3)


def no_gradients(make: Make, info: Any, options: dict[str, Any]) -> None:
    parameters = problem(info)
    optimizer = make(parameters)
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert list(optimizer.state.values()) == []


def zero_gradients(make: Make, info: Any, options: dict[str, Any]) -> None:
    if options.get("weight_decay", 0.01 if "SGD" not in info.optim_cls.__name__ else 0):
        return
    parameters = problem(info)
    optimizer = make(parameters)
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def empty_gradient(make: Make, info: Any, options: dict[str, Any]) -> None:
    parameters = [nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(2, 0, 3))]
    optimizer = make(parameters)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()


def gradients_stay(make: Make, info: Any, options: dict[str, Any]) -> None:
    parameters = problem(info)
    optimizer = make(parameters)
    loss_of(parameters).backward()
    before = [(p.grad.clone(), p.grad._version) for p in parameters if p.grad is not None]
    optimizer.step()
    for (value, version), p in zip(before, parameters, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, value)
        assert p.grad._version == version


def printed(make: Make, info: Any, options: dict[str, Any]) -> None:
    assert "Parameter Group 0" in repr(make(problem(info)))


def saved_and_loaded(
    make: Make, info: Any, options: dict[str, Any], without: tuple[str, ...], named: bool
) -> None:
    parameters = problem(info)
    optimizer = make([(f"p{i}", p) for i, p in enumerate(parameters)] if named else parameters)
    train(optimizer, parameters)
    others = copy.deepcopy(parameters)
    other = make([(f"q{i}", p) for i, p in enumerate(others)] if named else others)
    state = through_a_file(optimizer.state_dict())
    kept = copy.deepcopy(state)
    for group in state["param_groups"]:
        for key in without:
            group.pop(key, None)
    other.load_state_dict(state)
    if not without:
        assert str(state) == str(kept), "loading has changed what it was given"
    for group in other.param_groups:
        group["maximize"] = options.get("maximize", False)
    train(optimizer, parameters)
    train(other, others)
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    if not without and not named:
        assert str(optimizer.state_dict()) == str(other.state_dict())


def plain_step(make: Make, info: Any, options: dict[str, Any]) -> None:
    parameters = problem(info)
    optimizer = make(parameters)
    train(optimizer, parameters, 3)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        if torch.is_tensor(entry.get("step")):
            entry["step"] = entry["step"].item()
    optimizer.load_state_dict(state)
    train(optimizer, parameters, 3)


def hooks(make: Make, info: Any, options: dict[str, Any]) -> None:
    parameters, seen = problem(info), []
    optimizer = make(parameters)
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    optimizer.register_step_post_hook(lambda *_: seen.append(2))
    first = optimizer.register_state_dict_pre_hook(lambda *_: seen.append(3))
    optimizer.register_state_dict_post_hook(lambda o, s: seen.append(4) or {**s, "test": True})
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append(5) or None)
    optimizer.register_load_state_dict_pre_hook(
        lambda o, s: {**s, "param_groups": [{**g, "lr": 0.002} for g in s["param_groups"]]}
    )
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(
            6 if o.state[parameters[0]] or info.optim_cls is torch.optim.SGD else 7
        )
    )
    train(optimizer, parameters, 1)
    state = optimizer.state_dict()
    first.remove()
    assert state["test"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.002
    assert seen == [1, 2, 3, 4, 5, 6], seen


def copied(make: Make, info: Any, options: dict[str, Any]) -> None:
    parameters = problem(info)
    optimizer = make(parameters)
    train(optimizer, parameters, 2)
    public = {key for key in optimizer.__dict__ if not key.startswith("_")}
    twin = copy.deepcopy(optimizer)
    assert public == {key for key in twin.__dict__ if not key.startswith("_")}


def same_whichever(
    make_with: Callable[..., Make], info: Any, options: dict[str, Any], name: str
) -> None:
    """foreach or fused against the loop."""
    results = []
    for chosen in ({"foreach": False}, {name: True}):
        parameters = problem(info)
        train(make_with({**options, **chosen})(parameters), parameters)
        results.append(parameters)
    torch.testing.assert_close(*results)


def tensor_rate(make_with: Callable[..., Make], info: Any, options: dict[str, Any]) -> None:
    results = []
    for lr in (1e-3, torch.tensor(1e-3)):
        parameters = problem(info)
        train(make_with({**options, "lr": lr})(parameters), parameters, 5)
        results.append(parameters)
    torch.testing.assert_close(*results)


def scaled(make: Make, info: Any, options: dict[str, Any]) -> None:
    parameters = problem(info)
    optimizer, scaler = make(parameters), torch.amp.GradScaler("cpu", init_scale=128.0)
    before = float(loss_of(parameters))
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(loss_of(parameters)).backward()
        scaler.step(optimizer)
        scaler.update()
    after = float(loss_of(parameters))
    assert (after > before) if options.get("maximize") else (after < before)


def half(make: Make, info: Any, options: dict[str, Any]) -> None:
    parameters = problem(info, dtype=torch.bfloat16)
    train(make(parameters), parameters, 3)


def cases(name: str, cls: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    info = INFO["AdamW" if name == "Lion" else name]
    for number, given in enumerate(info.optim_inputs_func(device="cpu", dtype=torch.float32)):
        options = dict(given.kwargs)
        if name == "Lion":
            options.pop("amsgrad", None)

        def with_(changed: dict[str, Any]) -> Make:
            return lambda parameters: cls(parameters, **copy.deepcopy(changed))

        make = with_(options)
        head = f"{given.desc}"
        for way in (groups, complex_numbers, double, no_gradients, zero_gradients, empty_gradient,
                    gradients_stay, printed, plain_step, hooks, copied, scaled, half):  # fmt: skip
            yield (
                f"{head}: {way.__name__}",
                lambda way=way, make=make, o=options: way(make, info, o),
            )
        for contiguous, scheduled in itertools.product((True, False), (True, False)):
            yield (
                f"{head}: right direction, contiguous={contiguous}, scheduled={scheduled}",
                lambda make=make, o=options, c=contiguous, s=scheduled: right_direction(
                    make, info, o, c, s
                ),
            )
        olds = [(), ("maximize",), ("foreach",), ("fused",), ("differentiable",), ("capturable",)]
        for without, named in itertools.product(olds, (False, True)):
            yield (
                f"{head}: saved and loaded without {without}, named={named}",
                lambda make=make, o=options, w=without, n=named: saved_and_loaded(
                    make, info, o, w, n
                ),
            )
        for choice in ("foreach", "fused"):
            if choice in info.supported_impls and not isinstance(options.get("lr"), Tensor):
                yield (
                    f"{head}: {choice}",
                    lambda o=options, c=choice: same_whichever(with_, info, o, c),
                )
        yield f"{head}: tensor lr", lambda o=options: tensor_rate(with_, info, o)
        del number
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        yield f"error: {error.optimizer_error_input.desc}", lambda e=error: raises(cls, info, e)


def raises(cls: Any, info: Any, error: Any) -> None:
    given = error.optimizer_error_input
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            optimizer = cls(given.params or problem(info), **given.kwargs)
            if error.error_on == OptimizerErrorEnum.STEP_ERROR:
                optimizer.step()
        except error.error_type as raised:
            said = str(raised)
        else:
            said = "nothing was raised"
    assert re.search(error.error_regex, said), said


def outcome(run: Callable[[], None]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


def main() -> None:
    """Print every case in which ours does not do what torch's does, and the count."""
    warnings.simplefilter("ignore")
    for name, cls in PAIRS:
        peer = INFO["AdamW" if name == "Lion" else name].optim_cls
        theirs = dict(cases("AdamW" if name == "Lion" else name, peer))
        wanted = good = 0
        misses: dict[str, int] = {}
        for label, run in cases(name, cls):
            if name != "Lion" and outcome(theirs[label]):
                print(f"{name}: torch's own class fails: {label}: {outcome(theirs[label])}")
                continue  # no reference
            wanted += 1
            found = outcome(run)
            good += not found
            if found:
                misses[f"{label.split(': ')[-1]} | {found}"] = (
                    misses.get(f"{label.split(': ')[-1]} | {found}", 0) + 1
                )
        print(f"{name}: {good} of {wanted}")
        for miss, count in misses.items():
            print(f"  {count} x {miss}")


if __name__ == "__main__":
    main()
