"""The pages of the site that are made from the code: the API, the commands, and their keys."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from functools import cache
from inspect import getdoc
from pathlib import Path
from typing import get_args, get_origin

from halfstep.cli import commands as grammar
from halfstep.cli.commands import COMMANDS, Start
from halfstep.trainer.config.run import BaseConfig

LANGUAGES = ("en", "zh")
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "halfstep"
WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
"""What these pages say: a name, then the phrase in every language."""


def generated_pages(language: str) -> Iterator[tuple[str, str]]:
    """Each page's path below docs/, as that of the English page, and its Markdown."""
    yield "commands.md", commands(language)
    yield "configuration.md", configuration(language)
    for section in SECTIONS:
        yield f"api/{section}.md", api(section, language)


# ---- commands and keys ----------------------------------------------------------------------


def commands(language: str) -> str:
    """The page of commands."""
    words = {name: phrase[language] for name, phrase in WORDS.items()}
    parts = [f"# {words['commands']}", words["commands_text"]]
    for name, kind in COMMANDS.items():
        parts.append(f"## halfstep {name} {{: #{name.replace(' ', '-')} }}")
        parts.append(plain(getdoc(kind)))
        runs = issubclass(kind, BaseConfig)
        options = list(grammar.leaves(Start if runs else kind))
        rows = [_row(one, _spelling(one), language) for one in options]
        parts.append(table(("option", "values", "default", "meaning"), rows, words))
        if runs:
            parts.append(words["plus"])
    parts += [f"## {words['exit']} {{: #exit-codes }}", plain(grammar.EXIT_CODES)]
    return "\n\n".join(part for part in parts if part) + "\n"


def configuration(language: str) -> str:
    """The page of the keys of every configuration."""
    words = {name: phrase[language] for name, phrase in WORDS.items()}
    parts = [f"# {words['configuration']}", words["configuration_text"]]
    seen: dict[str, list[str]] = {}
    first = ""
    for name, kind in COMMANDS.items():
        if not issubclass(kind, BaseConfig):
            continue
        short = {key: f"--{word}" for word, key in grammar.short_options(kind).items()}
        parts.append(f"## {words['of'].format(name=name)} {{: #{name.replace(' ', '-')} }}")
        sections: dict[str, list[list[str]]] = {}
        for option in grammar.leaves(kind):
            row = _row(option, f"`{option.key}`", language)
            if option.key in short and short[option.key] != grammar.option_name(option.key):
                row[3] += f" ({words['also']} `{short[option.key]}`)"
            if seen.get(option.key) != row:
                sections.setdefault(option.key.rpartition(".")[0], []).append(row)
                seen.setdefault(option.key, row)
        if first:
            parts.append(words["same"].format(name=first))
        first = first or name
        for section, rows in sections.items():
            title = f"`[{section}]`" if section else words["top"]
            parts.append(f"### {title} {{: #{name.replace(' ', '-')}-{section or 'top'} }}")
            parts.append(table(("key", "values", "default", "meaning"), rows, words))
    return "\n\n".join(parts) + "\n"


def _spelling(option: grammar.Option) -> str:
    if "positional" in option.field.metadata:
        return f"`{option.key.upper()}`"
    return f"`{grammar.option_name(option.key)}`"


def _row(option: grammar.Option, name: str, language: str) -> list[str]:
    words = {name: phrase[language] for name, phrase in WORDS.items()}
    hint = option.hint
    if type(None) in get_args(hint):
        hint = next(one for one in get_args(hint) if one is not type(None))
    several = get_origin(hint) is tuple
    one = get_args(hint)[0] if several else hint
    choices = grammar.choices_of(hint)
    values = ", ".join(f"`{word}`" for word in choices)
    if not values:
        values = {bool: words["switch"], str: words["any"], int: "N", float: "X"}.get(one, "")
    default = option.field.default
    if default is MISSING and option.field.default_factory is MISSING:
        shown = words["required"]
    elif default is MISSING or default in ("", None, (), False):
        shown = ""
    else:
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        shown = f"`{shown.lower() if default is True else shown}`"
    return [
        name,
        values + (" ..." if several else ""),
        shown,
        plain(option.field.metadata.get("help", "")),
    ]


def table(columns: tuple[str, ...], rows: list[list[str]], words: Mapping[str, str]) -> str:
    """A Markdown table; empty without rows."""
    if not rows:
        return ""
    lines = [[words[column] for column in columns], ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def plain(text: str) -> str:
    """Help as Markdown: what looks like a tag or emphasis is shown as it stands."""
    return re.sub(r"(?<!`)([<*\[\]])(?!`)", r"\\\1", text.replace("``", "`"))


# ---- the API --------------------------------------------------------------------------------


def exports(package: str) -> dict[str, str]:
    """The public names of a package, each with the module that defines it."""
    folder = SOURCE / Path(*package.split(".")[1:])
    stub = folder / "__init__.pyi"
    tree = ast.parse((stub if stub.exists() else folder / "__init__.py").read_text("utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            home = f"{package}.{node.module}" if node.level else node.module
            found |= {alias.asname or alias.name: home for alias in node.names}
    return found


@cache
def public() -> dict[str, tuple[str, str]]:
    """Public name to how it is imported, and where it is defined."""
    return {
        name: (f"{package}.{name}", f"{home}.{name}")
        for package in ("halfstep.optim", "halfstep.distributed", "halfstep")
        for name, home in exports(package).items()
    }


@cache
def sections() -> dict[str, tuple[str, tuple[str, ...]]]:
    """The pages of the API as docs/reference.md groups the names: slug to title and names."""
    parts = {}
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        slug = re.sub(r"\W+", "-", title.partition(":")[0].lower()).strip("-")
        cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
        parts[slug] = title, re.findall(r"`(\w+)`", " ".join(cells)), re.findall(r"`(\w+)`", body)
    left = dict.fromkeys(public())
    for _, in_table, _ in parts.values():
        for name in in_table:
            left.pop(name, None)
    return {  # what no table has is where the text names it
        slug: (title, tuple(n for n in dict.fromkeys([*in_table, *(n for n in said if n in left)])
                            if n in public()))
        for slug, (title, in_table, said) in parts.items()
    }  # fmt: skip


MODULES = {
    "integrations": tuple(
        f"halfstep.integrations.{name}" for name in ("accelerate", "hf_trainer", "lightning")
    ),
    "formats": ("halfstep.formats", "halfstep.formats.floats", "halfstep.formats.blocks"),
}
"""Pages that show whole modules."""

SECTIONS = (*sections(), *MODULES)


def api(section: str, language: str) -> str:
    """A page of the API."""
    if section in MODULES:
        title = f"halfstep.{section}"
        blocks = [_directive(module, module, 2) for module in MODULES[section]]
    else:
        title, names = sections()[section]
        title = re.sub(r"`", "", _translated(title, section, language))
        blocks = [_directive(public()[name][1], public()[name][0], 2) for name in names]
    return "\n\n".join([f"# {title}", *blocks]) + "\n"


def _directive(path: str, shown: str, level: int) -> str:
    return (
        f"::: {path}\n    options:\n      heading: {shown}\n      toc_label: {shown}\n"
        f"      heading_level: {level}"
    )


def _translated(title: str, section: str, language: str) -> str:
    page = ROOT / "docs" / f"reference.{language}.md"
    if language == "en" or not page.exists():
        return title
    titles = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return titles[list(sections()).index(section)]
