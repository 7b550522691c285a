"""Starts ranks for ``halfstep train --nproc N``: torchrun's launcher with halfstep's agent.

``halfstep train --nproc N ... -- OPTIONS`` means ``torchrun --nproc-per-node N OPTIONS -m halfstep
train ...``. On one machine the ranks meet at a loopback port; with options for several machines
they meet as under torchrun.
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
from contextlib import ExitStack, redirect_stderr
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousError, rendezvous_handler_registry
from torch.distributed.launcher import api
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes

from halfstep.cli.agent import LOOPBACK, Agent, Ended, Loopback, report
from halfstep.cli.commands import Request
from halfstep.cli.grammar import LANG
from halfstep.cli.outcome import FOLDER, INTERRUPTED, read_outcomes
from halfstep.cli.words import told
from halfstep.errors import ConfigError, PeerError
from halfstep.words import spoken

_SCRIPT = "<nothing>"  # placeholder for the program, which torchrun's parser requires
_SAVING_SECONDS = 600  # time for ranks to save and exit after a signal
_HINT = "torchrun --help lists the options, those of train stand before --"
_FORBIDDEN = ("module", "no_python", "run_path", "virtual_local_rank")


def run(request: Request) -> int:
    """Train on ``--nproc`` ranks of this machine, and return the run's exit code."""
    nproc = request.start.nproc or 0
    if nproc < 1:
        given = request.start.nproc
        raise ConfigError(f"--nproc {given}; allowed: integers >= 1, the ranks on this machine")
    inside = [name for name in ("RANK", "TORCHELASTIC_RUN_ID") if name in os.environ]
    if inside:
        raise ConfigError(
            f"--nproc {nproc} inside a process that is a rank already ({inside[0]} is set); give "
            "the number of ranks to the outer launcher only"
        )
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="halfstep-"))
        config = _launch_config(request.launcher, nproc, folder)
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)
        stack.callback(logging.disable, logging.root.manager.disable)
        _prepare(config, nproc, folder)
        arguments = _worker_arguments([LANG, spoken(), *request.words])
        return _watch(config, arguments, Path(folder), nproc)


def _prepare(config: api.LaunchConfig, nproc: int, folder: str) -> None:
    """Prepare this process as launcher: set what ranks inherit, and replace torch's agent."""
    os.environ[FOLDER] = folder
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // nproc)))
    if config.rdzv_backend == LOOPBACK:
        for loopback in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    rendezvous_handler_registry.register(LOOPBACK, Loopback)
    # patched in, as torch's launcher takes no agent, and only an agent sees each attempt's end
    setattr(api, "LocalElasticAgent", Agent)  # noqa: B010
    if os.environ.get("HALFSTEP_DEBUG") != "1":
        logging.disable(logging.ERROR)  # silences torchrun's log


def _watch(config: api.LaunchConfig, arguments: list[str], folder: Path, nproc: int) -> int:
    """Run torch's launcher to its end, and return the exit code."""
    try:
        api.elastic_launch(config, sys.executable)(*arguments)
    except Ended as end:
        return end.code
    except SignalException as error:
        outcomes = read_outcomes(folder).values()
        if len(outcomes) == nproc and {outcome.code for outcome in outcomes} <= {0, INTERRUPTED}:
            return max(outcome.code for outcome in outcomes)
        said = [outcome for outcome in outcomes if outcome.message]
        if said:
            return report(said, nproc)
        name = signal.Signals(error.sigval).name
        lost = told("stopped_unsaved", signal=name)
        print(told("error", message=lost), file=sys.stderr)
        return 128 + int(error.sigval)
    except PeerError:
        raise
    except ValueError as error:  # from --rdzv-backend or --rdzv-endpoint
        raise ConfigError(f"after --: {error}; {_HINT}") from error
    except (RendezvousError, RuntimeError) as error:  # torch.distributed raises both
        reason = str(error).partition("\n")[0]
        raise PeerError(
            f"the machines did not meet at {config.rdzv_endpoint or 'a loopback port'}: {reason}; "
            "check --master-addr and --master-port, or --rdzv-endpoint, on every machine"
        ) from error
    return 0


def _worker_arguments(given: list[str]) -> list[str]:
    """Return the arguments of ``python`` for a rank: these words without ``--nproc``."""
    words: list[str] = []
    left = iter(given)
    for word in left:
        if word == "--nproc":
            next(left)
        elif not word.startswith("--nproc="):
            words.append(word.replace("$", "$$"))  # the agent substitutes $ and ${} in arguments
    safe = [] if os.getcwd() in sys.path else ["-P"]  # give ranks the module path of this process
    return [*safe, "-u", "-m", "halfstep", *words]


def _launch_config(words: list[str], nproc: int, folder: str) -> api.LaunchConfig:
    """Parse what follows ``--`` by torchrun's own parser."""
    options = _torchrun_options(words)
    options.nproc_per_node = str(nproc)
    try:
        alone = _on_this_machine_only(options)
        if options.master_port is None:
            options.master_port = 29500  # Source: torch.distributed.run
        if options.log_dir is None and (options.redirects, options.tee) == ("0", "0"):
            options.log_dir = f"{folder}/logs"  # by default, torchrun leaves a folder in /tmp
        if getattr(options, "shutdown_timeout", 0) is None:
            options.shutdown_timeout = _SAVING_SECONDS  # torch would kill a save after 30 s
        config, _, _ = config_from_args(options)
        if alone:
            config.rdzv_backend, config.rdzv_endpoint = LOOPBACK, ""
    except (AssertionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"after --: {error}; {_HINT}") from error
    return config


def _torchrun_options(words: list[str]) -> argparse.Namespace:
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
    """Whether this is the only machine, by the rule of torch.distributed.run.run."""
    _, machines = parse_min_max_nnodes(options.nnodes)
    static = options.rdzv_backend == "static"
    if options.standalone and machines > 1:  # torchrun would wait for machines that cannot come
        raise ValueError(f"--standalone is one machine, --nnodes {options.nnodes} are several")
    if static and machines > 1 and ":" in options.nnodes:
        raise ValueError(
            f"--nnodes {options.nnodes} may change; that needs --rdzv-backend c10d and "
            "--rdzv-endpoint HOST:PORT"
        )
    unspecified = not options.rdzv_endpoint and options.master_port is None
    return bool(options.standalone or (machines == 1 and static and unspecified))
