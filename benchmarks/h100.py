"""Ten minutes on one GPU: speed, memory and launches of halfstep beside plain torch.

    python benchmarks/h100.py --out FOLDER [--parts 0 A C] [--minutes 9.5] [--wheels FOLDER]

README.md beside this file says what the parts measure and what a line means. Each variant stands
alone: what it raises becomes its line. Each line is printed as it is found and appended to
``h100-DATE.jsonl``, so a run that is cut off keeps what it has.
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
import sys
import tempfile
import time
import warnings
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

SECONDS = {"0": 30, "A": 150, "C": 60, "D": 55, "B": 205, "E": 30, "F": 40}
"""Each part's share of the time, in the order of worth; what one leaves, the next ones have."""
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 FLOP/s. **Source:** NVIDIA's data sheets of the SXM parts, without sparsity."""
SPLIT8 = "bf16-split,moments=8bit"
BLOCK_SECONDS = 1.5  # a slow variant takes fewer steps a block
FORMATS = {
    "text": "{}", "tokens_per_second": "tok/s {:,.0f}", "steps_per_second": "steps/s {:.1f}",
    "tflops": "{:.0f} TFLOP/s", "ms": "{:.3f} ms", "of": "x{:.3f} of {}", "mfu": "MFU {:.1%}",
    "peak_gb": "peak {:.2f} GB", "kernels": "kernels {:,}", "host_ms": "host {:.1f} ms",
    "all_threads_ms": "all threads {:.1f} ms", "graphs": "graphs {}", "breaks": "breaks {}",
    "recompiles": "recompiles {}", "spread": "spread {:.1%} of {} blocks",
    "build_seconds": "built in {:.0f} s", "tail_ms": "tail {:.3f} ms", "dear": "steps 63-65 {}",
    "first_ms": "first step {:.0f} ms", "state_ms": "state {:.0f} ms", "syncs": "{:g} a step",
    "evaluation_ms": "10 evaluations {:.0f} ms", "host_top": "{}",
}  # fmt: skip
"""How a figure is printed; the others are in the file alone."""


class Bench:
    """The device, the deadline of the part that runs, and the file of what was found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self.tiny = torch.device(arguments.device), arguments.tiny
        self.policies, self.cuda = arguments.policies, self.device.type == "cuda"
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

    def kernels(self, step: Callable[[], object]) -> int:
        """Kernels that a step launches; on a CPU, the operators that it calls."""
        events = [e for e in self.profiled(step).events() if e.device_type == self.kind]
        kernels = [e for e in events if not getattr(e, "is_user_annotation", False)]
        return sum(not e.name.startswith(("Memcpy", "Memset")) for e in kernels)


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
        self.figures["kernels"] = bench.kernels(self.step)
        if "compiled" in name:
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
    compiled = ", compiled" if name.endswith(", compiled") else ""
    return f"bare {kind if kind in ('fp32', 'fp16') else 'bf16'}{compiled}"


def compare(bench: Bench, job: Job, names: Sequence[str], *, alone: bool = False,
            wrap: Callable[[Step], Callable] = lambda step: step) -> None:  # fmt: skip
    """Time the variants in turns, block by block.

    Compiled ones run one after the other: dynamo keeps one cache for all that share a forward's
    code. So do all where memory cannot hold them (``alone``).
    """
    single = [name for name in names if alone or name.endswith(", compiled")]
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
            timed.say(bases.get(base_of(timed.name)) or next(iter(bases.values())))
            del timed.step  # its memory; the blocks stay for comparisons
        alive.clear()
        bench.release()


def facts(bench: Bench) -> None:
    """Versions and rates; what compiles to one graph; how often a step waits for the device."""
    found = environment(bench.device)
    bench.say("machine", found["device_name"], text=found["packages"], environment=found)
    rates(bench)
    modules = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    switches = [module.fp32_precision for module in modules]
    bench.say("machine", "cudnn conv, cudnn rnn, matmul", text=", ".join(switches))
    job = bench.jobs.transformer()
    for policy in ("fp32", "bf16-mixed", "fp16-mixed", "bf16-split", bench.fp8):
        torch._dynamo.reset()
        bench.attempt("fullgraph", policy, functools.partial(one_graph, bench, job, policy))
    torch._dynamo.reset()
    bench.attempt("fullgraph", "a whole step", lambda: whole_step(bench, job))
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


def one_graph(bench: Bench, job: Job, policy: str) -> None:
    """Compile a forward in the policy's context with fullgraph=True; an error is the answer."""
    step = Step(job, f"halfstep {policy}", bench.backend)
    whole = torch.compile(step.model, backend="eager", fullgraph=True)
    with step.autocast():
        whole(*job.batch)
    bench.say("fullgraph", policy, text="yes")


def whole_step(bench: Bench, job: Job) -> None:
    """Compile a function that calls precision.step."""
    step, before = Step(job, "halfstep bf16-mixed", bench.backend), traced()
    torch.compile(step, backend="eager")()
    bench.say("fullgraph", "a whole step", text="runs", breaks=traced()[1] - before[1])


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


def gpt2(bench: Bench) -> None:
    """GPT-2 of 124 M parameters on 16 x 1024 tokens: each policy, uncompiled and compiled."""
    names = ["bare bf16", *(f"halfstep {policy}" for policy in bench.policies[:2])]
    names += [*(f"{name}, compiled" for name in names)]
    names += ["bare bf16, plain head, compiled", "bare bf16, liger head, compiled"]
    for policy in bench.policies[2:]:
        base = base_of(f"halfstep {policy}")
        more = [*(() if base in names else (base,)), f"halfstep {policy}"]
        names += [*more, *(f"{name}, compiled" for name in more)]
    compare(bench, bench.jobs.gpt2(), names)


def llama(bench: Bench) -> None:
    """Llama of 1.1 B parameters on 4 x 2048 tokens, compiled layer by layer."""
    kinds = ["bare bf16", "halfstep bf16-mixed", f"halfstep {SPLIT8}"]
    kinds += ["bare bf16, torchao tensorwise", f"halfstep {bench.fp8}"]
    kinds += ["bare bf16, torchao rowwise"]
    names = [*(f"{kind}, compiled" for kind in kinds), f"halfstep {bench.fp8}"]
    job = bench.attempt("llama-1.1b", "model", bench.jobs.llama)
    if job is not None:
        compare(bench, job, names, alone=True)


def launch_bound(bench: Bench) -> None:
    """Three models whose step on a GPU is bound by launches; the switches that halfstep pins."""
    mixed = "halfstep bf16-mixed"
    names = "bare bf16", mixed, f"{mixed}, torch.AdamW", "halfstep bf16-split"
    for size, make in {"12x64": bench.jobs.transformer, "bert-base": bench.jobs.bert,
                       "resnet50": bench.jobs.resnet}.items():  # fmt: skip
        job = bench.attempt(size, "model", make)
        if job is None:
            continue
        split = f"{names[-1]},keep_fp32=type:BatchNorm2d" if size == "resnet50" else names[-1]
        compare(bench, job, [*names[:-1], split, "bare fp32", "halfstep fp32"])
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # nothing to pin
            compare(bench, job, [f"{name}, without tf32" for name in names[:2]])


def linears(bench: Bench) -> None:
    """Forward and backward of one linear layer over 16,384 rows."""

    def without_tail(step: Step) -> Callable[[], None]:
        def backward() -> None:
            step.backward()
            step.model.zero_grad(set_to_none=True)
            step.batch[0].grad = None

        return backward

    shapes = (4096, 4096), (2048, 5632), (768, 3072), (4096, 14336)
    names = ["bare bf16", f"halfstep {bench.fp8}", "bare bf16, compiled"]
    names += ["bare bf16, torchao tensorwise, compiled", f"halfstep {bench.fp8}, compiled"]
    for shape in ((32, 64),) if bench.tiny else shapes:
        compare(bench, bench.jobs.linear(*shape), names, wrap=without_tail)


def classify(bench: Bench) -> None:
    """Where the time of fine-tuning BERT goes, on the host and on the device."""
    job = bench.attempt("bert-base", "model", lambda: bench.jobs.bert(rows=32))
    for name in ("halfstep fp32", "halfstep bf16-split", "bare fp32", "bare bf16") if job else ():
        bench.attempt(job.name, name, functools.partial(explained, bench, job, name))
        bench.release()


def explained(bench: Bench, job: Job, name: str) -> None:
    step, count = Step(job, name, bench.backend), 2 if bench.tiny else 40
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
    with torch.no_grad(), step.autocast():
        evaluated = bench.seconds(lambda: [step.model(*job.batch).item() for _ in range(10)])
    bench.say(
        job.name, name, ms=1e3 * device, host_ms=1e3 * host, all_threads_ms=1e3 * threads,
        first_ms=1e3 * first, state_ms=1e3 * saved, evaluation_ms=1e3 * evaluated,
        host_top=[*own.items()][:3], host_ms_by_function=own,
        device_us_by_kernel={each.key: getattr(each, key) for each in kernels[:12]},
    )  # fmt: skip


def save(step: Step) -> None:
    state = [step.model.state_dict(), step.optimizer.state_dict()]
    if step.precision is not None:
        state.append(step.precision.state_dict())
    with tempfile.TemporaryFile() as file:
        torch.save(state, file)


def tails(bench: Bench) -> None:
    """What follows the backward (check, clip, update), step by step, at two sizes."""
    sizes = {"gpt2-124m": bench.jobs.gpt2, "llama-1.1b": bench.jobs.llama}
    names = ("bare bf16", f"halfstep {SPLIT8}", "halfstep bf16-split", "halfstep bf16-mixed",
             "bare fp16", "halfstep fp16-mixed")  # fmt: skip
    for size, make in sizes.items():
        job, bases = bench.attempt(size, "model", functools.partial(make, 1, 64)), {}
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


PARTS = {"0": facts, "A": gpt2, "B": llama, "C": launch_bound, "D": linears, "E": classify,
         "F": tails}  # fmt: skip


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=[*SECONDS], default=[*SECONDS])
    parser.add_argument("--minutes", type=float, default=9.5, help="what all seven parts share")
    parser.add_argument("--policies", nargs="+", help="of part A",
                        default=["bf16-mixed", SPLIT8, "fp16-mixed", "fp32"])  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--wheels", help="folder in which torchao and liger-kernel are installed")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels, kept between runs")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small models: tests this script only")
    arguments = parser.parse_args(words)
    if arguments.device != "cpu" and not torch.cuda.is_available():
        sys.exit("h100: torch sees no CUDA device; --device cpu --tiny runs the code alone")
    if arguments.wheels:
        sys.path.append(arguments.wheels)
    if arguments.cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(arguments.cache / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(arguments.cache / "triton")
    bench, begin = Bench(arguments), time.monotonic()
    bench.deadline = begin
    for part in [part for part in SECONDS if part in arguments.parts]:
        bench.part, bench.needed = part, 3.0
        bench.deadline += SECONDS[part] * 60 * arguments.minutes / sum(SECONDS.values())
        try:
            PARTS[part](bench)
        except Exception as error:
            bench.say("part", PARTS[part].__name__, "failed", text=repr(error)[:300])
        bench.release()
    bench.say("end", "", text=f"{time.monotonic() - begin:.0f} s, in {bench.file}")
    return bench.file


if __name__ == "__main__":
    main()
