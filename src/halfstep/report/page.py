"""Builds a report of runs, and writes it as one HTML page, as Markdown or as JSON.

The page is one file without scripts or network: figures are SVG inside it, and its own content
policy forbids everything else. Every string of a run is escaped by the template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup

from halfstep.diagnostics.statistics.numerics import StepNumerics
from halfstep.diagnostics.statistics.values import Kind, TensorStatistics
from halfstep.diagnostics.statistics.what_if import what_if, window
from halfstep.diagnostics.trace.ran import is_product
from halfstep.errors import ConfigError
from halfstep.report.compare import Comparison, compare, flattened, shown_value
from halfstep.report.events import (
    Event,
    cause_words,
    events,
    told,
)
from halfstep.report.figures import figures, largest
from halfstep.report.findings import FEW, RunFinding, findings, verdict
from halfstep.report.memory import memory_json, memory_view
from halfstep.report.record import TRACE, RunRecord, scale_text
from halfstep.report.translation import N_, gettext
from halfstep.shown import bars

NAMES: Mapping[str, str] = {
    "run": N_("Run"),
    "precision": N_("Precision"),
    "model": N_("Model"),
    "machine": N_("Machine"),
    "steps": N_("Steps"),
    "skipped": N_("Skipped"),
    "first_loss": N_("First loss"),
    "last_loss": N_("Last loss"),
    "val_loss": N_("Validation loss"),
    "val_accuracy": N_("Validation accuracy"),
    "speed": N_("Tokens/s (median)"),
    "memory": N_("Peak memory"),
    "nonfinite": N_("not finite"),
    "spike": N_("spike"),
    "overflow": N_("gradient overflow"),
    "calibration": N_("calibration"),
    "activation": N_("activations"),
    "activation_gradient": N_("gradients of activations"),
    "gradient": N_("gradients of weights"),
    "update": N_("updates of weights"),
}
"""What a page calls a measure, or a kind of events or of tensors."""

FORMATS = ("fp16", "bf16", "e4m3fn", "e5m2")
MOST_OPERATIONS = 40
"""Rows of the table of what ran."""
SUFFIXES: Mapping[str, str] = {".html": "html", ".md": "md", ".json": "json"}


@dataclass(frozen=True, slots=True)
class Row:
    """One run's part of a report.

    Attributes:
        record: What was read.
        verdict: The run in one line.
        findings: What its user should know, worst first.
        card: Label to value, both as shown.
    """

    record: RunRecord
    verdict: str
    findings: Sequence[RunFinding]
    card: Mapping[str, str]

    @property
    def level(self) -> str:
        """The worst finding's level, or "healthy"."""
        worst = self.findings[0].level if self.findings else "note"
        return "healthy" if worst == "note" and len(self.record.steps) >= FEW else worst

    @property
    def trace_command(self) -> str:
        """The command that records what runs in which dtype."""
        config = self.record.config.get("run")
        folder = config.get("output_dir") if isinstance(config, dict) else None
        name = folder if isinstance(folder, str) and folder else self.record.name
        return f"halfstep trace {quote(name)} --save {quote(f'{name}/{TRACE}')}"


@dataclass(frozen=True, slots=True)
class Report:
    """Runs beside each other, in a language."""

    rows: Sequence[Row]
    language: str
    comparison: Comparison | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, the same in every language but for sentences."""
        compared = self.comparison
        return {
            "comparison": compared
            and {
                "verdict": [*compared.verdict],
                "measure": compared.measure,
                "step": compared.step,
                "groups": [
                    {
                        "name": group.name,
                        "runs": [run.name for run in group.runs],
                        "values": [*group.values],
                    }
                    for group in compared.groups
                ],
                "differs": dict(compared.differs),
            },
            "runs": [
                {
                    "name": row.record.name,
                    "precision": row.record.policy,
                    "level": row.level,
                    "verdict": row.verdict,
                    "findings": [
                        {
                            "level": f.level,
                            "name": f.name,
                            "values": dict(f.values),
                            "text": f.text(self.language),
                            "do": f.remedy(self.language),
                        }
                        for f in row.findings
                    ],
                    "card": dict(row.card),
                    "steps": len(row.record.steps),
                    "skipped": len(row.record.skipped),
                    "events": [_strict(asdict(event)) for event in events(row.record)],
                    "causes": _strict([*row.record.causes]),
                    "damaged": dict(row.record.damaged),
                    **memory_json(row.record, self.language),
                }
                for row in self.rows
            ],
        }

    def cards(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        """What the runs' cards tell by label: each run's where they differ, and what all share."""
        every = dict.fromkeys(label for row in self.rows for label in row.card)
        values = {label: [row.card.get(label, "") for row in self.rows] for label in every}
        unlike = {label: shown for label, shown in values.items() if len({*shown}) > 1}
        return unlike, {k: shown[0] for k, shown in values.items() if k not in unlike}

    def to_html(self) -> str:
        """One page of HTML that needs nothing else."""
        drawn = figures([row.record for row in self.rows], self.language)
        shown = [(figure.title, Markup(figure.svg)) for figure in drawn]
        unlike, shared = self.cards()
        memory = memory_view([row.record for row in self.rows], self.language, drawn=True)
        return self._written(
            "page.html.j2",
            figures=shown,
            formats=FORMATS,
            labels=[*unlike],
            shared=shared,
            memory=memory,
        )

    def to_markdown(self) -> str:
        """The same without figures."""
        memory = memory_view([row.record for row in self.rows], self.language)
        return self._written("page.md.j2", memory=memory)

    def _written(self, template: str, **more: Any) -> str:
        said = partial(gettext, language=self.language)
        environment = Environment(
            loader=PackageLoader("halfstep.report", "templates"),
            autoescape=template.endswith(".html.j2"),
            undefined=ChainableUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {**_FILTERS, "cause": self._cause}
        environment.filters["stored_bars"] = self._stored_bars
        made = environment.get_template(template)
        return made.render(report=self, gettext=said, names=NAMES, language=self.language, **more)

    def _cause(self, name: Any) -> str:
        return cause_words(str(name), self.language)

    def _stored_bars(self, trace: Mapping[str, Any]) -> Markup:
        products, stored = product_bars(trace), stored_bars(trace)
        drawn = bars(
            products,
            gettext("Calls of matrix products by the dtype of their operands", self.language),
        )
        return Markup(drawn + bars(stored, gettext("MB stored, by dtype", self.language)))

    def write(self, path: Path) -> Path:
        """Write the report in the form that the path's suffix names; whole or not at all.

        Raises:
            ConfigError: For another suffix, or a path that cannot be written.
        """
        form = SUFFIXES.get(path.suffix.lower())
        if form is None:
            raise ConfigError(f"--out {path}; allowed: a name that ends in {', '.join(SUFFIXES)}")
        text = {"html": self.to_html, "md": self.to_markdown, "json": self._json_text}[form]()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise ConfigError(f"--out {path} cannot be written: {error}") from error
        return path

    def _json_text(self) -> str:
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def make_report(runs: Sequence[RunRecord], language: str = "en") -> Report:
    """A report of runs that were read, in a language of the catalogue."""
    rows = [Row(run, verdict(run, language), findings(run), _card(run, language)) for run in runs]
    return Report(rows, language, compare(runs, language))


def _card(run: RunRecord, language: str) -> dict[str, str]:
    """What a reader wants to know first of a run."""
    planned = run.planned_steps
    card = {
        "run": run.name,
        "precision": run.policy,
        "model": _model(run),
        "machine": _machine(run),
        "steps": f"{len(run.steps):,}" + (f" / {planned:,}" if planned else ""),
        "skipped": f"{len(run.skipped):,}",
    }
    for label, key, which in (
        ("first_loss", "loss", 0),
        ("last_loss", "loss", -1),
        ("val_loss", "val_loss", -1),
    ):
        _, values = run.series(key)
        if values:
            card[label] = f"{values[which]:.4f}"
    _, accuracies = run.series("val_accuracy")
    if accuracies:
        card["val_accuracy"] = f"{accuracies[-1]:.2%}"
    speeds = [value for value in run.series("tokens_per_second")[1] if math.isfinite(value)]
    if speeds:
        card["speed"] = f"{median(speeds):,.0f}"
    peak = largest(run, "peak_memory_bytes")
    if peak is not None and math.isfinite(peak):
        card["memory"] = f"{peak / 1e6:,.0f} MB"
    return {gettext(NAMES[label], language): text for label, text in card.items() if text}


def _model(run: RunRecord) -> str:
    shape = run.config.get("model")
    name = run.config.get("name")
    parts = [name] if isinstance(name, str) else []
    if isinstance(shape, dict):
        keys = ("n_layer", "n_head", "n_embd", "vocab_size", "path")
        parts += [f"{key} {shape[key]}" for key in keys if shape.get(key)]
    return ", ".join(parts)


def _machine(run: RunRecord) -> str:
    cpu, gpus = run.environment.get("cpu"), run.environment.get("gpus")
    if str(run.environment.get("device")).startswith("cuda") and isinstance(gpus, list):
        return ", ".join(str(gpu.get("name")) for gpu in gpus if isinstance(gpu, dict))
    return str(cpu.get("name", "")) if isinstance(cpu, dict) else ""


def _strict(value: Any) -> Any:
    """The same without numbers that JSON does not have, which become text."""
    if isinstance(value, Mapping):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_strict(each) for each in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _range_of(found: Sequence[Event], kind: str) -> dict[str, Any]:
    """What the events of a kind have in common: their number, first and last step and scales."""
    alike = [event for event in found if event.kind == kind and not event.cause]
    scales = [event.loss_scale for event in alike if event.loss_scale is not None]
    if not alike:
        return {}
    ends = {key: scale_text(f(scales, default=1.0)) for key, f in (("low", min), ("high", max))}
    return {"count": len(alike), "first": alike[0].step, "last": alike[-1].step, **ends}


_PLAIN = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "\\`*_{}[]()#+!|"},
        **{sign: f"&#{ord(sign)};" for sign in "<>&"},
    }
)
"""What keeps a sign from meaning something in Markdown."""


def _one_line(value: Any) -> str:
    """Text for a cell of a Markdown table: one line, in which nothing ends the cell or is HTML."""
    return " ".join(str(value).split()).translate(_PLAIN)


# What a page shows of the numbers of each layer: what other formats would do, what really ran.


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """What each of :data:`FORMATS` would make of a tensor: shares flushed and overflowed."""

    kind: Kind
    name: str
    largest: float
    shares: Sequence[tuple[float, float]]
    scales: str
    """The loss scales that fit it in fp16, ``"none"``, or empty where a scale does not act."""


def what_ifs(step: StepNumerics, most: int = 12) -> list[WhatIfRow]:
    """The tensors that these formats would treat worst without a scale, worst first."""
    rows = [
        WhatIfRow(tensor.kind, tensor.name, tensor.absmax, [*_shares(tensor)], _scales(tensor))
        for tensor in step.tensors
        if tensor.kind != "weight" and tensor.nonzero
    ]
    return sorted(rows, key=lambda row: (-row.shares[0][1], -row.shares[0][0]))[:most]


def _shares(tensor: TensorStatistics) -> Iterator[tuple[float, float]]:
    for name in FORMATS:
        found = what_if(tensor, name)
        yield found.flushed, found.overflowed


def _scales(tensor: TensorStatistics) -> str:
    fit = window(tensor) if tensor.kind in ("activation_gradient", "gradient") else None
    if fit is None:
        return ""
    return f"2^{fit.low} … 2^{fit.high}" if fit.fits else "none"


@dataclass(frozen=True, slots=True)
class RanRow:
    """An operation in one combination of formats, over all modules that ran it."""

    direction: str
    op: str
    inputs: str
    outputs: str
    calls: int
    modules: int


def what_ran(trace: Mapping[str, Any], most: int | None = MOST_OPERATIONS) -> list[RanRow]:
    """Operations of a saved trace by direction, name and formats; what is malformed is left out."""
    found: dict[tuple[str, str, str, str], tuple[int, set[str]]] = {}
    given = trace.get("operations")
    for row in given if isinstance(given, list) else []:
        if not isinstance(row, dict) or not isinstance(row.get("calls"), int):
            continue
        forms = [", ".join(_texts(row.get(key))) for key in ("inputs", "outputs")]
        key = (str(row.get("direction")), str(row.get("op")), forms[0], forms[1])
        calls, modules = found.get(key, (0, set()))
        found[key] = calls + row["calls"], modules | {str(row.get("module"))}
    rows = [RanRow(*key, calls, len(modules)) for key, (calls, modules) in found.items()]
    order = ("forward", "backward", "update")
    rows.sort(key=lambda r: order.index(r.direction) if r.direction in order else len(order))
    return rows[:most]


def what_is_stored(trace: Mapping[str, Any]) -> list[tuple[str, str, int, int]]:
    """Kind, dtype, tensors and bytes of what a saved trace says that training keeps."""
    given = trace.get("stored")
    return [
        (str(row.get("kind")), str(row.get("dtype")), row["tensors"], row["bytes"])
        for row in (given if isinstance(given, list) else [])
        if isinstance(row, dict)
        and isinstance(row.get("tensors"), int)
        and isinstance(row.get("bytes"), int)
    ]


def product_bars(trace: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Calls of products by pass and by the dtype of their first operand, for a figure."""
    found: dict[str, dict[str, float]] = {}
    for row in what_ran(trace, most=None):
        if is_product(row.op):
            form = row.inputs.split(", ")[0].split(" ")[-1]
            calls = found.setdefault(row.direction, {})
            calls[form] = calls.get(form, 0) + row.calls
    return found


def stored_bars(trace: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Megabytes stored by kind and dtype, for a figure."""
    found: dict[str, dict[str, float]] = {}
    for kind, dtype, _, size in what_is_stored(trace):
        found.setdefault(kind, {})[dtype] = size / 1e6
    return found


def different(trace: Mapping[str, Any]) -> list[str]:
    """Where what ran differs from the policy, as the trace says it."""
    return _texts(trace.get("differences"))


def _texts(value: Any) -> list[str]:
    """Texts of a list, a run of equal ones once with its length: ``3 bf16``."""
    texts = [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
    runs: list[tuple[str, int]] = []
    for text in texts:
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    return [text if n == 1 else f"{n} {text}" for text, n in runs]


_FILTERS: Mapping[str, Callable[..., Any]] = {
    "line": _one_line,
    "flat": lambda table: [*flattened(table).items()],
    "what_ifs": what_ifs,
    "what_ran": what_ran,
    "stored": what_is_stored,
    "different": different,
    "events": events,
    "told": told,
    "shown_value": shown_value,
    "range_of": _range_of,
}
"""What the templates call, besides what depends on the language."""
