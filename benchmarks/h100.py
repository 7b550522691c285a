"""Seven minutes on one GPU: speed, memory and launches of halfstep beside plain torch.

    python benchmarks/h100.py --out FOLDER [--tests] [--parts 0 A C] [--minutes 7] [--wheels FOLDER]

README.md beside this file says what the parts measure and what a line means. Each variant stands
alone: what it raises becomes its line. Each line is printed as it is found and appended to
``h100-DATE.jsonl``, so a run that is cut off keeps what it has; what is worth most comes first.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import functools
import gc
import json
import os
import pstats
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from common import RESULTS
from h100_jobs import Job, Jobs, Step
from halfstep.trainer.environment import environment

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 FLOP/s. **Source:** NVIDIA's data sheets of the SXM parts, without sparsity."""
SPLIT8 = "bf16-split,moments=8bit"
COMPILED = ", compiled", ", graphed"
BLOCK_SECONDS = 1.5  # a slow variant takes fewer steps a block
FORMATS = {
    "text": "{}", "tokens_per_second": "tok/s {:,.0f}", "steps_per_second": "steps/s {:.1f}",
    "tflops": "{:.0f} TFLOP/s", "ms": "{:.3f} ms", "of": "x{:.3f} of {}", "mfu": "MFU {:.1%}",
    "peak_gb": "peak {:.2f} GB", "kernels": "kernels {:,}", "device_ms": "in {:.3f} ms",
    "host_ms": "host {:.1f} ms",
    "all_threads_ms": "all threads {:.1f} ms", "graphs": "graphs {}", "breaks": "breaks {}",
    "recompiles": "recompiles {}", "spread": "spread {:.1%} of {} blocks",
    "build_seconds": "built in {:.0f} s", "tail_ms": "tail {:.3f} ms", "dear": "steps 63-65 {}",
    "first_ms": "first step {:.0f} ms", "state_ms": "state {:.0f} ms", "syncs": "{:g} a step",
    "host_top": "{}",
}  # fmt: skip
"""How a figure is printed; the others are in the file alone."""


class Bench:
    """The device, the deadline of the part that runs, and the file of what was found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self.tiny = torch.device(arguments.device), arguments.tiny
        self.policies, self.parts = arguments.policies, arguments.parts
        self.cuda = self.device.type == "cuda"
        self.kind = DeviceType.CUDA if self.cuda else DeviceType.CPU
        self.jobs = Jobs(self.device, self.tiny)
        # a tiny run looks at code paths, not at generated kernels
        self.backend = "eager" if self.tiny else "inductor"
        self.warm_up, self.steps, self.blocks = (1, 1, 2) if self.tiny else (5, 12, 3)
        self.fp8 = "fp8" if self.cuda else "fp8,simulate=yes"
        name = torch.cuda.get_device_name(self.device) if self.cuda else ""
        self.peak = next((value for key, value in PEAKS.items() if key in name), None)
        self.part, self.deadline = "0", 0.0
        self.needed = 3.0  # seconds that the part's last variant took to be built
        arguments.out.mkdir(parents=True, exist_ok=True)
        self.file = arguments.out / f"h100-{datetime.datetime.now(datetime.UTC).date()}.jsonl"

    def say(self, size: str, variant: str, status: str = "ok", **figures: Any) -> None:
        """Print a line and append a record."""
        shown = {key: value for key, value in figures.items() if key in FORMATS}
        texts = [FORMATS[key].format(*(value if isinstance(value, tuple) else [value]))
                 for key, value in shown.items()]  # fmt: skip
        mark = "" if status == "ok" else f"{status}: "
        print(f"{self.part} {size:<10} {variant:<38} {mark}{' | '.join(texts)}", flush=True)
        record = {"part": self.part, "size": size, "variant": variant, "status": status, **figures}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def attempt(self, size: str, variant: str, function: Callable[[], Any]) -> Any:
        """Call it within the part's time; an error, or lack of time, becomes a line."""
        left = self.deadline - time.monotonic()
        try:
            if left < self.needed:
                self.say(size, variant, "skipped", text=f"{left:.0f} s are left to this part")
                return None
            with within(left):
                return function()
        except ImportError as error:
            self.say(size, variant, "missing", text=error.name or str(error))
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            self.say(size, variant, "failed", text=f"{type(error).__name__}: {first[:300]}")
        self.release()
        return None

    def release(self) -> None:
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def allocated(self, peak: bool = False) -> int:
        read = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
        return read(self.device) if self.cuda else 0

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, function: Callable[[], object]) -> float:
        """Seconds of one call on an idle device, with the end of its work waited for."""
        self.wait()
        begin = time.perf_counter()
        function()
        self.wait()
        return time.perf_counter() - begin

    def block(self, step: Callable[[], object], count: int) -> tuple[float, float, float]:
        """Seconds a step: of the device, of the host's main thread, of all its threads."""
        self.wait()
        begin, thread, process = self.mark(), time.thread_time(), time.process_time()
        for _ in range(count):
            step()
        host = time.thread_time() - thread, time.process_time() - process
        end = self.mark()
        self.wait()
        return (between(begin, end) / count, *(value / count for value in host))

    def profiled(self, step: Callable[[], object]) -> Any:
        both = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        with profile(activities=both) as found:
            step()
            self.wait()
        return found

    def kernels(self, step: Callable[[], object]) -> tuple[int, float]:
        """Kernels that a step launches and the ms that they take; on a CPU, operators."""
        events = [e for e in self.profiled(step).events() if e.device_type == self.kind]
        kernels = [e for e in events if not getattr(e, "is_user_annotation", False)]
        kernels = [e for e in kernels if not e.name.startswith(("Memcpy", "Memset"))]
        return len(kernels), sum(e.time_range.elapsed_us() for e in kernels) / 1e3


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when its seconds are over."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than the {seconds:.0f} s that were left")

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def between(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def traced() -> tuple[int, int]:
    """Graphs and graph breaks of dynamo so far."""
    return counters["stats"]["unique_graphs"], counters["graph_break"].total()


class Timed:
    """A variant that is warm, with the blocks that were timed."""

    def __init__(self, bench: Bench, job: Job, name: str, wrap: Callable[[Step], Callable]) -> None:
        bench.release()
        self.bench, self.job, self.name = bench, job, name
        held, before, begin = bench.allocated(), traced(), time.perf_counter()
        self.step = wrap(Step(job, name, bench.backend))
        bench.seconds(self.step)
        built, first = time.perf_counter() - begin, traced()
        bench.needed = max(3.0, built)
        bench.reset_peak()
        last = min(bench.seconds(self.step) for _ in range(bench.warm_up))
        self.figures = {
            "build_seconds": built,
            "peak_gb": (bench.allocated(peak=True) - held) / 1e9,
        }
        # a host that is slower than the device hides how fast kernels are
        self.figures["kernels"], self.figures["device_ms"] = bench.kernels(self.step)
        if name.endswith(COMPILED):
            names, after = ("graphs", "breaks", "recompiles"), traced()
            found = first[0] - before[0], after[1] - before[1], after[0] - first[0]
            self.figures |= dict(zip(names, found, strict=True))
        self.count = max(2, min(bench.steps, int(BLOCK_SECONDS / last)))
        self.taken: list[tuple[float, float, float]] = []
        self.turn()

    def turn(self) -> None:
        self.taken.append(self.bench.block(self.step, self.count))

    def say(self, base: Timed | None, status: str = "ok") -> None:
        """Print medians over blocks; a ratio is that of blocks beside each other."""
        taken, job = [seconds for seconds, *_ in self.taken], self.job
        step, host, threads = (median(column) for column in zip(*self.taken, strict=True))
        figures: dict[str, Any] = {"ms": 1e3 * step}
        if job.tokens:
            figures["tokens_per_second"] = job.tokens / step
        elif not job.flops:
            figures["steps_per_second"] = 1 / step
        if job.flops:
            figures["tflops"] = job.flops / step / 1e12
        if base is not None and base is not self:
            both = zip(base.taken, self.taken, strict=False)
            figures["of"] = median(theirs[0] / mine[0] for theirs, mine in both), base.name
        if job.flops and self.bench.peak:
            figures["mfu"] = job.flops / step / self.bench.peak
        figures |= {"host_ms": 1e3 * host, "all_threads_ms": 1e3 * threads, **self.figures,
                    "spread": ((max(taken) - min(taken)) / step, len(taken))}  # fmt: skip
        self.bench.say(job.name, self.name, status, **figures, seconds=taken)


def base_of(name: str) -> str:
    """The bare loop that a variant is compared with."""
    kind = name.split(", ")[0].split(" ")[1].removesuffix("-mixed")
    compiled = next((end for end in COMPILED if name.endswith(end)), "")
    return f"bare {kind if kind in ('fp32', 'fp16') else 'bf16'}{compiled}"


def compare(bench: Bench, job: Job, names: Sequence[str], *, alone: bool = False,
            wrap: Callable[[Step], Callable] = lambda step: step,
            base: Callable[[str], str] = base_of) -> None:  # fmt: skip
    """Time the variants in turns, block by block.

    Compiled ones run one after the other: dynamo keeps one cache for all that share a forward's
    code. So do all where memory cannot hold them (``alone``).
    """
    single = [name for name in names if alone or name.endswith(COMPILED)]
    groups = [[name for name in names if name not in single], *([name] for name in single)]
    bases: dict[str, Timed] = {}
    for group in groups:
        torch._dynamo.reset()
        alive: list[Timed] = []
        for name in group:
            make = functools.partial(Timed, bench, job, name, wrap)
            timed = bench.attempt(job.name, name, make)
            if timed is None:
                continue
            alive.append(timed)
            bases[name] = timed
            if len(group) > 1:  # its last line comes when all have had their turns
                timed.say(None, "first block")
        for _ in range(bench.blocks - 1):
            for timed in alive:
                bench.attempt(job.name, timed.name, timed.turn)
        for timed in alive:
            timed.say(bases.get(base(timed.name)) or next(iter(bases.values())))
            del timed.step  # its memory; the blocks stay for comparisons
        alive.clear()
        bench.release()


def waits(bench: Bench) -> None:
    """The machine, and how often a step waits for the device; in a few seconds."""
    found = environment(bench.device)
    bench.say("machine", found["device_name"], text=found["packages"], environment=found)
    job = bench.jobs.transformer()
    for name in ("halfstep bf16-mixed", "halfstep bf16-mixed, torch.AdamW"):
        bench.attempt("syncs", name, functools.partial(syncs, bench, job, name))


def rates(bench: Bench) -> None:
    """Rates of a large bf16 matmul and of a copy, by which the others can be judged."""
    edge, size = (64, 2**16) if bench.tiny else (8192, 2**31)
    a = torch.randn(edge, edge, device=bench.device, dtype=torch.bfloat16)
    source = torch.empty(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    works = (lambda: a @ a), (lambda: target.copy_(source))
    matmul, copy = (min(bench.block(work, 5)[0] for _ in range(3)) for work in works)
    bench.say("machine", "bf16 matmul", tflops=2 * edge**3 / matmul / 1e12)
    bench.say("machine", "copy", text=f"{2 * size / copy / 1e12:.2f} TB/s read and written")


def syncs(bench: Bench, job: Job, name: str) -> None:
    """Count the waits for the device in ten steps, as torch warns of them."""
    if not bench.cuda:
        bench.say("syncs", name, "skipped", text="needs a CUDA device")
        return
    step = Step(job, name, bench.backend)
    bench.block(step, 5)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(10):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "called a synchronizing" in str(w.message)]
    places = sorted({f"{Path(w.filename).name}:{w.lineno}" for w in found})
    bench.say("syncs", name, syncs=len(found) / 10, text=f"at {places}")


def first_of(bench: Bench) -> list[str]:
    """The loop by hand and the first two policies."""
    return ["bare bf16", *(f"halfstep {policy}" for policy in bench.policies[:2])]


def gpt2(bench: Bench) -> None:
    """GPT-2 of 124 M parameters on 16 x 1024 tokens, compiled."""
    names = *first_of(bench), "bare bf16, plain head"
    compare(bench, bench.jobs.gpt2(), [f"{name}, compiled" for name in names])


def gpt2_more(bench: Bench) -> None:
    """The same uncompiled; then the other policies, and other heads."""
    job = bench.jobs.gpt2()
    compare(bench, job, first_of(bench))
    pairs = [[base_of(f"halfstep {p}"), f"halfstep {p}"] for p in bench.policies[2:]]
    for pair in pairs:
        compare(bench, job, [*pair, *(f"{name}, compiled" for name in pair)])
    compare(bench, job, ["bare bf16, liger head, compiled"])


def llama(bench: Bench) -> None:
    """Llama of 1.1 B parameters on 4 x 2048 tokens, compiled layer by layer."""
    kinds = ["bare bf16", f"halfstep {bench.fp8}", "bare bf16, torchao tensorwise"]
    kinds += ["halfstep bf16-mixed", f"halfstep {SPLIT8}"]
    job = bench.attempt("llama-1.1b", "model", bench.jobs.llama)
    if job is not None:
        compare(bench, job, [f"{kind}, compiled" for kind in kinds], alone=True)


def launch_bound(bench: Bench, *, graphed: bool = False) -> None:
    """Three models whose step on a GPU is bound by launches, or by none: a CUDA graph."""
    names = ["bare bf16", "halfstep bf16-mixed", "halfstep bf16-mixed, torch.AdamW"]
    for size in ("12x64", "bert-base", "resnet50"):
        job = bench.attempt(size, "model", functools.partial(MODELS[size], bench.jobs))
        split = "halfstep bf16-split" + ",keep_fp32=type:BatchNorm2d" * (size == "resnet50")
        found = [f"{name}, graphed" for name in names[:2]] if graphed else [*names, split]
        if job is not None:
            compare(bench, job, found)


def linears(bench: Bench, *, more: bool = False) -> None:
    """Forward and backward of one linear layer over 16,384 rows."""

    def without_tail(step: Step) -> Callable[[], None]:
        def backward() -> None:
            step.backward()
            step.model.zero_grad(set_to_none=True)
            step.batch[0].grad = None

        return backward

    shapes = ((32, 64),) if bench.tiny else ((4096, 4096), (2048, 5632), (768, 3072))
    names = ["bare bf16", f"halfstep {bench.fp8}"]
    if not more:
        names = [f"{name}, compiled" for name in (*names, "bare bf16, torchao tensorwise")]
    for shape in shapes:
        compare(bench, bench.jobs.linear(*shape), names, wrap=without_tail)


def classify(bench: Bench, *, more: bool = False) -> None:
    """Fine-tuning BERT; then where its time goes, on the host and on the device."""
    job = bench.attempt("bert-base", "model", lambda: bench.jobs.bert(rows=32))
    names = ["bare fp32", "halfstep bf16-split", "bare bf16", "halfstep fp32"]
    if job is None:
        return
    if not more:
        compare(bench, job, names, base=lambda _: "bare fp32")
        return
    compiled = [f"{name}, compiled" for name in names[:2]]
    compare(bench, job, compiled, base=lambda _: compiled[0])
    for name in names[1:3]:
        bench.attempt(job.name, name, functools.partial(explained, bench, job, name))
        bench.release()


def explained(bench: Bench, job: Job, name: str) -> None:
    step, count = Step(job, name, bench.backend), 2 if bench.tiny else 20
    first = bench.seconds(step)
    device, host, threads = bench.block(step, count)
    clock = cProfile.Profile()
    clock.runcall(bench.block, step, count)
    calls = sorted(pstats.Stats(clock).stats.items(), key=lambda row: -row[1][2])[:12]
    own = {f"{Path(file).name}:{line} {call}": round(1e3 * row[2] / count, 2)
           for (file, line, call), row in calls}  # fmt: skip
    key = "self_device_time_total" if bench.cuda else "self_cpu_time_total"
    found = [each for each in bench.profiled(step).key_averages() if each.device_type == bench.kind]
    kernels = sorted(found, key=lambda each: -getattr(each, key))
    saved = bench.seconds(functools.partial(save, step))
    bench.say(
        job.name, f"{name}, explained", ms=1e3 * device, host_ms=1e3 * host,
        all_threads_ms=1e3 * threads, first_ms=1e3 * first, state_ms=1e3 * saved,
        host_top=[*own.items()][:3], host_ms_by_function=own,
        device_us_by_kernel={each.key: getattr(each, key) for each in kernels[:12]},
    )  # fmt: skip


def save(step: Step) -> None:
    state = [step.model.state_dict(), step.optimizer.state_dict()]
    if step.precision is not None:
        state.append(step.precision.state_dict())
    with tempfile.TemporaryFile() as file:
        torch.save(state, file)


def tails(bench: Bench, *, more: bool = False) -> None:
    """What follows the backward (check, clip, update), step by step."""
    names = ["bare bf16", f"halfstep {SPLIT8}", "halfstep bf16-split", "halfstep bf16-mixed"]
    size, names = ("llama-1.1b", names[:2]) if more else ("gpt2-124m", names)
    make = functools.partial(MODELS[size], bench.jobs, 1, 64)
    job, bases = bench.attempt(size, "model", make), {}
    for name in names if job else ():
        bench.attempt(size, name, functools.partial(tail, bench, job, name, bases))
        bench.release()


def tail(bench: Bench, job: Job, name: str, bases: dict[str, float]) -> None:
    """Time 68 tails, among them the 64th, which is dear with 8-bit moments; then read the state."""
    step, marks = Step(job, name, bench.backend), []
    for _ in range(10 if bench.tiny else 68):
        step.backward()
        begin = bench.mark()
        step.tail()
        marks.append((begin, bench.mark()))
    bench.wait()
    ms = [1e3 * between(*pair) for pair in marks]
    usual = bases[name] = median(ms[8:])
    figures: dict[str, Any] = {"tail_ms": usual, "dear": [round(each, 2) for each in ms[62:65]]}
    if base_of(name) in bases and base_of(name) != name:
        figures["of"] = bases[base_of(name)] / usual, base_of(name)
    if step.precision is not None:
        bench.reset_peak()
        held = bench.allocated()
        figures["state_ms"] = 1e3 * bench.seconds(step.precision.state_dict)
        figures["peak_gb"] = (bench.allocated(peak=True) - held) / 1e9
    elements = sum(p.numel() for p in step.model.parameters())
    bench.say(job.name, name, **figures, elements=elements, tails_ms=ms)


MODELS: dict[str, Callable[..., Job]] = {
    "gpt2-124m": Jobs.gpt2, "llama-1.1b": Jobs.llama, "12x64": Jobs.transformer,
    "bert-base": Jobs.bert, "resnet50": Jobs.resnet,
}  # fmt: skip
PLAN: tuple[tuple[str, Callable[[Bench], None], float], ...] = (
    ("0", waits, 15), ("A", gpt2, 150), ("D", linears, 60), ("B", llama, 150),
    ("E", classify, 40), ("F", tails, 45), ("C", launch_bound, 60), ("0", rates, 10),
    ("A", gpt2_more, 120), ("D", functools.partial(linears, more=True), 30),
    ("C", functools.partial(launch_bound, graphed=True), 60),
    ("E", functools.partial(classify, more=True), 60),
    ("F", functools.partial(tails, more=True), 60),
)  # fmt: skip
"""Parts in the order of worth, and the most seconds that one may take of seven minutes."""
AHEAD = 105.0
"""Seconds that compiling ahead may take."""
TESTS = "95"
"""Seconds that the tests may take."""


def compile_ahead(bench: Bench, words: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Compile what matters most, each variant in a process of its own, into torch's cache.

    A compilation that starts from nothing takes a minute, most of it in one thread.
    """
    more = [f"halfstep {bench.fp8}", "bare bf16, torchao tensorwise"]
    plain = "bare bf16, plain head"
    work = {
        "A": ("gpt2-124m", [*first_of(bench), plain]),
        "B": ("llama-1.1b", first_of(bench) + more),
    }
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    commands = [
        [sys.executable, __file__, *words, "--compile", size, f"{name}, compiled"]
        for part, (size, names) in work.items() if part in bench.parts for name in names
    ]  # fmt: skip
    quiet = subprocess.DEVNULL
    return [subprocess.Popen(c, env=environment, stdout=quiet, stderr=quiet) for c in commands]


def compile_one(bench: Bench, size: str, name: str) -> None:
    """Take one step of a variant; a Llama is compiled layer by layer, so that one layer will do."""
    few = {"layers": 1} if size == "llama-1.1b" else {}
    Step(MODELS[size](bench.jobs, **few), name, bench.backend)()


def load_compiled(folder: Path | None) -> bool:
    """Take what another run has compiled, perhaps on another machine, from its files."""
    files = sorted(folder.glob("compiled-*.bin")) if folder else []
    if files:
        content = zlib.decompress(b"".join(file.read_bytes() for file in files))
        torch.compiler.load_cache_artifacts(content)
    return bool(files)


def save_compiled(folder: Path | None) -> None:
    """Write what this run has compiled or loaded, in files of at most 15 MiB."""
    found = torch.compiler.save_cache_artifacts() if folder else None
    if folder is None or found is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    content, size = zlib.compress(found[0]), 15 * 2**20
    for old in folder.glob("compiled-*.bin"):
        old.unlink()
    for number, at in enumerate(range(0, len(content), size)):
        (folder / f"compiled-{number}.bin").write_bytes(content[at : at + size])


def run_tests(bench: Bench) -> None:
    """Run the tests that need a GPU, while others compile; ``tests.txt`` gets each as it ends."""
    root, log = Path(__file__).parents[1], bench.file.with_name("tests.txt")
    files = [file for file in root.glob("tests/**/test_*.py") if "mark.gpu" in file.read_text()]
    words = ["timeout", "--foreground", "-s", "INT", "-k", "9", TESTS, sys.executable, "-u", "-m",
             "pytest", "-m", "gpu and not distributed", "-v", "-n", "8", "--tb=short",
             "-p", "no:cacheprovider", "--continue-on-collection-errors"]  # fmt: skip
    with log.open("w") as out:  # interrupted, it says what has failed so far
        subprocess.run([*words, *files], stdout=out, stderr=out, cwd=root)
    lines = log.read_text().splitlines()
    failed = [line.partition("FAILED ")[2] for line in lines if " FAILED tests/" in line]
    bench.say("tests", log.name, text=lines[-1] if lines else "", failed=failed)


def wait_for(bench: Bench, ahead: list[subprocess.Popen[bytes]], begin: float) -> None:
    """Wait for what is compiled ahead, since it would disturb what is timed."""
    for child in ahead:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.1, begin + AHEAD - time.monotonic()))
        child.kill()
    codes = [child.returncode for child in ahead]
    bench.say("machine", "compiled ahead", build_seconds=time.monotonic() - begin, codes=codes)


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__)
    letters = [*dict.fromkeys(part for part, *_ in PLAN)]
    parser.add_argument("--parts", nargs="+", choices=letters, default=letters)
    parser.add_argument("--tests", action="store_true", help="first the tests that need a GPU")
    parser.add_argument("--minutes", type=float, default=7.0, help="what all parts share")
    parser.add_argument("--policies", nargs="+", help="of part A",
                        default=["bf16-mixed", SPLIT8, "fp16-mixed", "fp32"])  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--wheels", help="folder in which torchao and liger-kernel are installed")
    parser.add_argument("--cache", type=Path, help="folder of what was compiled, for the next run")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small models: tests this script only")
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.device != "cpu" and not torch.cuda.is_available():
        sys.exit("h100: torch sees no CUDA device; --device cpu --tiny runs the code alone")
    if arguments.wheels:
        sys.path.append(arguments.wheels)
    bench, begin = Bench(arguments), time.monotonic()
    if arguments.compile:
        compile_one(bench, *arguments.compile)
        return bench.file
    loaded = load_compiled(arguments.cache)
    given = sys.argv[1:] if words is None else words
    ahead = compile_ahead(bench, given) if bench.cuda and not loaded else []
    if arguments.tests:
        run_tests(bench)
    for part, function, seconds in PLAN:
        if part not in arguments.parts:
            continue
        if ahead and part != "0":
            wait_for(bench, ahead, begin)
            ahead = []
        bench.part, bench.needed = part, 3.0
        most = seconds * arguments.minutes / 7
        bench.deadline = min(begin + 60 * arguments.minutes, time.monotonic() + most)
        try:
            function(bench)
        except Exception as error:
            bench.say("part", part, "failed", text=repr(error)[:300])
        bench.release()
        if function in (gpt2, llama):  # a run that is cut off keeps these
            save_compiled(arguments.cache)
    save_compiled(arguments.cache)
    bench.say("end", "", text=f"{time.monotonic() - begin:.0f} s, in {bench.file}")
    return bench.file


if __name__ == "__main__":
    main()
