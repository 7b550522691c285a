"""What mkdocs does beyond its plugins: pages made from the code, links that leave docs/, search.

A page of the nav that is not written yet is left out; tests/docs/test_site.py lists those.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from generated import LANGUAGES, SECTIONS, generated_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify
from typesetting import typeset

ROOT = Path(__file__).parents[2]
FILES = "repository"
"""The folder of the site with the files outside docs/ that pages link to, as text."""

log = logging.getLogger("mkdocs.hooks.site")
_LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?![a-z]+:)([^)#\s]*)(#[^)\s]*)?\)")
_SLUG = slugify(case="lower")
MADE = {path for path, _ in generated_pages("en")}


@event_priority(100)
def on_config(config: MkDocsConfig) -> None:
    """Prepare the pages, and complete the nav: the pages of the API, and only what is written."""
    site = Path(config.site_dir)
    folder = site.with_name(f"{site.name}-pages")
    _prepare(folder)
    config.docs_dir = str(folder)
    config.nav = [_written(entry, folder) for entry in config.nav or []]


@event_priority(-100)
def on_pre_build(config: MkDocsConfig) -> None:
    """Forget the places of names on the pages of the other language, which is built before."""
    places = config.plugins["autorefs"]
    for kind in ("_primary_url_map", "_secondary_url_map", "_abs_url_map", "_backlinks"):
        getattr(places, kind).clear()


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> None:
    """Make what is read from docstrings in the language of the page, as in "Parameters:"."""
    config.plugins["mkdocstrings"].handlers._locale = _language(page)


def on_page_content(html: str, *, page: Page, **_: Any) -> str:
    """Typeset a page."""
    return typeset(html, _language(page))


def on_post_template(output: str, *, template_name: str, config: MkDocsConfig) -> str:
    """Leave out the Chinese page for what is not found, which would replace the English one."""
    return "" if template_name == "404.html" and config.theme["language"] != "en" else output


@event_priority(-200)
def on_post_build(config: MkDocsConfig) -> None:
    """Finish the index of the search, also as a script: a page in a folder cannot fetch it.

    No word is left out, since each Chinese character is one: of an overflow, 上溢, the list of the
    search has the first. Last, since the plugin for languages adds the other language when it ends.
    """
    path = Path(config.site_dir) / "search" / "search_index.json"
    if path.exists():
        index = json.loads(path.read_text(encoding="utf-8"))
        index["config"]["pipeline"] = []
        text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
        path.write_text(text, encoding="utf-8")
        path.with_suffix(".js").write_text(f"var __index = {text}", encoding="utf-8")


def _language(page: Page) -> str:
    return next((lang for lang in LANGUAGES if page.url.startswith(f"{lang}/")), "en")


def _written(entry: Any, folder: Path) -> Any:
    if isinstance(entry, dict):
        ((title, inside),) = entry.items()
        if title == "API" and len(inside) == 1:
            inside = [*inside, *(f"api/{section}.md" for section in SECTIONS)]
        kept = [_written(one, folder) for one in inside]
        return {title: [one for one in kept if one]}
    if isinstance(entry, str) and not (folder / entry).exists():
        log.info("nav: %s is not written yet", entry)
        return None
    return entry


def _prepare(folder: Path) -> None:
    """Make the folder that mkdocs reads: the pages of docs/, the generated ones, what they show.

    A folder, since the plugin for languages takes no page that is not a file. What has not changed
    is not written, so that `mkdocs serve`, which watches it, comes to rest.
    """
    texts: dict[str, bytes] = {}
    for path in sorted((ROOT / "docs").rglob("*")):
        name = path.relative_to(ROOT / "docs").as_posix()
        if path.suffix == ".md" and name != "plan.md" and not name.startswith("decisions/"):
            text = path.read_text(encoding="utf-8")
            texts |= {
                _shown(outside): _text(ROOT / outside).encode()
                for _, target, _ in _LINK.findall(text)
                if (outside := _outside(name, target))
            }
            texts[name] = _page(name, text).encode()
        elif path.suffix != ".md" and path.is_file():
            texts[name] = path.read_bytes()
    for language in LANGUAGES:
        for name, text in generated_pages(language):
            suffix = ".md" if language == "en" else f".{language}.md"
            texts[name.removesuffix(".md") + suffix] = text.encode()
    for old in folder.rglob("*"):
        if old.is_file() and old.relative_to(folder).as_posix() not in texts:
            old.unlink()
    for name, content in texts.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _shown(path: str) -> str:
    """Where a file is on the site; the plugin for languages would read .py and .md as languages."""
    return f"{FILES}/{path.replace('.', '-')}.txt"


def _text(path: Path) -> str:
    if path.is_dir():
        return "".join(f"{path.name}/{one.name}\n" for one in sorted(path.iterdir()))
    return path.read_text(encoding="utf-8")


def _outside(page: str, target: str) -> str | None:
    """The path from the root of what a page links to, if that is a file that is no page."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    inside = path.startswith("docs/") and not path.startswith("docs/decisions/")
    return None if inside or not (ROOT / path).exists() else path


def _page(name: str, markdown: str) -> str:
    """A page without what is meant for the tests, with its data, and with links that find files."""
    markdown = re.sub(
        r"^ *<!--\s*(?:setup|not run|continues|task)\b.*?-->\n+", "", markdown, flags=re.M | re.S
    )
    markdown = re.sub(r"^\[(?:中文|English)\]\([\w.-]+\)\n+", "", markdown, flags=re.M)

    def found(match: re.Match[str]) -> str:
        target = _target(name, match[2], match[3] or "")
        return f"[{match[1]}]({target})" if target else match[1]

    markdown = re.sub(_LINK, found, _with_anchors(name, markdown))
    return re.sub(r"<!-- data: (\S+) -->", lambda match: _data(match[1]), markdown)


def _target(name: str, target: str, anchor: str) -> str:
    """Where a link of a page leads on the site; empty if to a page that nobody wrote yet."""
    folder = posixpath.dirname(name)
    if posixpath.basename(target).startswith("README"):
        return posixpath.relpath("index.md", folder)
    if outside := _outside(name, target):
        return posixpath.relpath(_shown(outside), folder)
    page = ROOT / "docs" / folder / target if target else ROOT / "docs" / name
    if target.endswith(".md") and not page.exists():
        english = page.with_name(page.name.replace(".zh.md", ".md"))
        if not english.exists() and english.name not in MADE:
            log.info("%s: %s is not written yet", name, target)
            return ""
        # The English page stands in for it, whose anchors are others.
        return target.replace(".zh.md", ".md") + (anchor if anchor.isascii() else "")
    if name.replace(".zh.md", ".md") == posixpath.join(folder, target.replace(".zh.md", ".md")):
        return anchor  # to itself or to its twin, which the site's head links to
    if anchor and page.name.endswith(".zh.md"):
        anchor = "#" + dict(_anchors(page)).get(anchor[1:], anchor[1:])
    return target + anchor


def _headings(markdown: str) -> list[re.Match[str]]:
    fences = [match.span() for match in re.finditer(r"^ *```.*?^ *```", markdown, re.M | re.S)]
    return [
        heading
        for heading in re.finditer(r"^#+ (.*?)(?: *\{.*#.*\})?$", markdown, re.MULTILINE)
        if not any(start < heading.start() < end for start, end in fences)
    ]


def _anchors(page: Path) -> list[tuple[str, str]]:
    """Each heading's anchor as a page itself would have it, and that of the English page."""
    twin = page.with_name(page.name.replace(".zh.md", ".md"))
    texts = [path.read_text(encoding="utf-8") for path in (page, twin) if path.exists()]
    slugs = [[_SLUG(_plain(heading[1]), "-") for heading in _headings(text)] for text in texts]
    return list(zip(slugs[0], slugs[-1], strict=False))  # a test says whether both have as many


def _plain(heading: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading)


def _with_anchors(name: str, markdown: str) -> str:
    """A Chinese page whose headings have the anchors of the English page: a link serves both."""
    if not name.endswith(".zh.md"):
        return markdown
    headings = _headings(markdown)
    anchors = _anchors(ROOT / "docs" / name)
    for heading, (_, anchor) in reversed(list(zip(headings, anchors, strict=False))):
        if "{" not in heading[0]:
            markdown = f"{markdown[: heading.end()]} {{: #{anchor} }}{markdown[heading.end() :]}"
    return markdown


def _data(name: str) -> str:
    """A JSON file of docs/javascripts, in the page, since a page in a folder cannot fetch it."""
    text = (ROOT / "docs" / "javascripts" / name).read_text(encoding="utf-8").strip()
    return f'<script type="application/json" id="{name}">{text}</script>'
