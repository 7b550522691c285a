"""``halfstep train --nproc N``: start N ranks and watch over them, as torchrun does.

``halfstep train --nproc N ... -- OPTIONS`` is ``torchrun --nproc-per-node N OPTIONS -m halfstep
train ...``, with torchrun's own agent in this process. On one machine the ranks meet at a loopback
port; with options for several machines they meet as torchrun's do.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes

from halfstep.cli.agent import SIGNALS, Agent, Ended, Loopback, worker_spec
from halfstep.cli.outcome import FOLDER, INTERRUPTED, read_outcomes
from halfstep.errors import ConfigError, PeerError
from halfstep.torch_version import LAUNCHER, require_torch

_SCRIPT = "<nothing>"  # stands for the program in torchrun's grammar
_SAVING_SECONDS = 600  # that ranks have to save and end after a signal
_HINT = "torchrun --help lists the options, those of train stand before --"
_FORBIDDEN = ("module", "no_python", "run_path", "virtual_local_rank")


def run(arguments: argparse.Namespace) -> int:
    """Train on ``arguments.nproc`` ranks of this machine; returns the run's exit code."""
    require_torch(LAUNCHER)
    nproc = arguments.nproc
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}; allowed: integers >= 1, the ranks on this machine")
    inside = [name for name in ("RANK", "TORCHELASTIC_RUN_ID") if name in os.environ]
    if inside:
        raise ConfigError(
            f"--nproc {nproc} inside a process that is a rank already ({inside[0]} is set); give "
            "the number of ranks to the outer launcher only"
        )
    options = _torchrun_options(arguments.launcher)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="halfstep-")))
        environment = {FOLDER: str(folder)}
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
            environment["OMP_NUM_THREADS"] = str(max(1, (cores or 1) // nproc))
        alone = _on_this_machine_only(options)
        if alone and "GLOO_SOCKET_IFNAME" not in os.environ:
            for loopback in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
                environment["GLOO_SOCKET_IFNAME"] = loopback
        stack.enter_context(_environment(environment))
        stack.enter_context(_quiet())
        config = _launch_config(options, nproc, folder)
        handler = stack.enter_context(Loopback()) if alone else _elsewhere(config)
        spec = worker_spec(config, handler, sys.executable, _worker_arguments(arguments))
        if config.rdzv_backend == "static" and not alone:
            spec.master_addr, spec.master_port = parse_rendezvous_endpoint(config.rdzv_endpoint, -1)
        agent = Agent(spec, config, folder)
        stack.enter_context(_signals_restored())
        return _watch(agent, folder, config, nproc)


def _watch(agent: Agent, folder: Path, config: LaunchConfig, nproc: int) -> int:
    """Run the agent to its end; the exit code."""
    try:
        result = agent.run()
    except Ended as end:
        return end.code
    except SignalException as error:
        outcomes = read_outcomes(folder)
        codes = {outcome.code for outcome in outcomes.values()}
        if len(outcomes) == nproc and codes <= {0, INTERRUPTED}:
            return max(codes)
        code = agent.report_outcomes()
        if code is not None:
            return code
        name = signal.Signals(error.sigval).name
        _complain(f"stopped by {name} before all ranks had saved; what was not saved is lost")
        return 128 + int(error.sigval)
    except (RendezvousError, RuntimeError) as error:  # torch.distributed's own errors are both
        reason = str(error).partition("\n")[0]
        raise PeerError(
            f"the machines did not meet at {config.rdzv_endpoint or 'a loopback port'}: {reason}; "
            "check --master-addr and --master-port, or --rdzv-endpoint, on every machine"
        ) from error
    if result is None or result.state != WorkerState.SUCCEEDED:
        raise PeerError("the run ended on another machine; its message there tells why")
    return 0


def _worker_arguments(arguments: argparse.Namespace) -> list[str]:
    """What follows ``python`` in a rank's command line: this command's without ``--nproc``."""
    words: list[str] = []
    given = iter(arguments.words)
    for word in given:
        if word == "--nproc":
            next(given)
        elif not word.startswith("--nproc="):
            words.append(word)
    words += [f"--{key}={value}" for key, value in arguments.overrides]
    safe = [] if os.getcwd() in sys.path else ["-P"]  # the ranks find modules where we do
    # "$$": the agent replaces $ and ${} in arguments
    return [*safe, "-u", "-m", "halfstep", *(word.replace("$", "$$") for word in words)]


def _torchrun_options(words: list[str]) -> argparse.Namespace:
    """Read what stands after ``--``, with torchrun's own parser."""
    parser = get_args_parser()
    parser.set_defaults(nproc_per_node="")
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            options = parser.parse_args([*words, _SCRIPT])
    except SystemExit as end:
        if not end.code:
            raise  # --help
        reason = complaint.getvalue().strip().rpartition("error: ")[2]
        raise ConfigError(f"after --: {reason}; {_HINT}") from None
    if options.training_script != _SCRIPT or options.training_script_args:
        raise ConfigError(
            f"after --: {options.training_script!r} is not an option of torchrun; {_HINT}"
        )
    if options.nproc_per_node:
        raise ConfigError("after --: --nproc-per-node; say it as --nproc N before --")
    for name in _FORBIDDEN:
        if getattr(options, name, False):
            raise ConfigError(f"after --: --{name.replace('_', '-')}; ranks run halfstep train")
    return options


def _on_this_machine_only(options: argparse.Namespace) -> bool:
    """Whether no other machine takes part, by the rule of torch.distributed.run.run."""
    try:
        _, machines = parse_min_max_nnodes(options.nnodes)
    except (RuntimeError, ValueError):
        raise ConfigError(f"--nnodes {options.nnodes}; allowed: N, or MIN:MAX") from None
    if options.standalone and machines > 1:
        raise ConfigError(f"--standalone is one machine, --nnodes {options.nnodes} are several")
    if machines > 1 and options.rdzv_backend == "static" and ":" in options.nnodes:
        raise ConfigError(
            f"--nnodes {options.nnodes} may change; that needs --rdzv-backend c10d and "
            "--rdzv-endpoint HOST:PORT"
        )
    unspecified = not options.rdzv_endpoint and options.master_port is None
    static = options.rdzv_backend == "static"
    return bool(options.standalone or (machines == 1 and static and unspecified))


def _launch_config(options: argparse.Namespace, nproc: int, folder: Path) -> LaunchConfig:
    """Torchrun's own reading of its options."""
    options.nproc_per_node = str(nproc)
    if options.master_port is None:
        options.master_port = 29500  # Source: torch.distributed.run
    if options.log_dir is None and (options.redirects, options.tee) == ("0", "0"):
        options.log_dir = str(folder / "logs")  # which torchrun would leave behind in /tmp
    if hasattr(options, "shutdown_timeout") and options.shutdown_timeout is None:
        options.shutdown_timeout = _SAVING_SECONDS  # torch would kill a save after 30 s
    try:
        config, _, _ = config_from_args(options)
    except (AssertionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"after --: {error}; {_HINT}") from error
    return config


def _elsewhere(config: LaunchConfig) -> RendezvousHandler:
    """Where several machines meet."""
    try:
        return get_rendezvous_handler(
            RendezvousParameters(
                backend=config.rdzv_backend,
                endpoint=config.rdzv_endpoint,
                run_id=config.run_id,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                local_addr=config.local_addr,
                **config.rdzv_configs,
            )
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"after --: --rdzv-backend {config.rdzv_backend} --rdzv-endpoint "
            f"{config.rdzv_endpoint}: {error}"
        ) from error


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables, which the agent hands to the ranks."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torchrun's log off stderr; HALFSTEP_DEBUG=1 shows it."""
    before = logging.root.manager.disable
    if os.environ.get("HALFSTEP_DEBUG") != "1":
        logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Take back the handlers that the agent installs."""
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _complain(message: str) -> None:
    print(f"halfstep: error: {message}", file=sys.stderr)
