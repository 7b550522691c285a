"""The site: it builds without a warning, its links lead somewhere, and it has two languages."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from pymdownx.slugs import slugify
from tests.docs.blocks import DOCS, ROOT, pages

import halfstep
from every import every
from halfstep.cli.commands import COMMANDS, leaves as options_of, option_name, parser_of
from halfstep.trainer.config.run import BaseConfig
from strangers import engines

AWAITED: set[str] = set()
"""Pages of the nav that are not written yet; empty in the end."""

PAGES = {path.relative_to(DOCS).as_posix(): path for path in pages()}
ENGLISH = sorted(name for name in PAGES if not name.endswith(".zh.md"))
SLUG = slugify(case="lower")
GENERATED = {"commands.md", "configuration.md"}  # and those of the API, which the hook adds


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags of Python matter to mkdocs alone."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def leaves(nav):
    for entry in nav.values() if isinstance(nav, dict) else nav:
        if isinstance(entry, str):
            yield entry
        else:
            yield from leaves(entry)


def test_every_page_is_in_the_nav_once_and_the_nav_has_no_other():
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)["nav"]
    assert Counter(leaves(nav)) == Counter([*ENGLISH, *GENERATED, *AWAITED])


def twin(name):
    return name.replace(".md", ".zh.md")


def test_every_page_is_there_in_chinese():
    assert {name for name in PAGES if name.endswith(".zh.md")} == {twin(name) for name in ENGLISH}


def form(text):
    """Levels of headings, languages of fences, columns and rows of tables, in order."""
    fences = re.findall(r"^ *```(\w*)[^\n]*\n.*?^ *```$", text, re.M | re.S)
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    headings = [len(marks) for marks in re.findall(r"^(#+) ", prose, re.M)]
    tables = re.findall(r"(?:^ *\|.*\n?)+", prose, re.M)
    sizes = [(len(t.splitlines()), t.splitlines()[1].count("|")) for t in tables]
    return {"headings": headings, "fences": fences, "tables": sizes}


def test_both_languages_have_the_same_form():
    def check(path):
        both = path, path.with_name(twin(path.name))
        english, chinese = (form(one.read_text(encoding="utf-8")) for one in both)
        assert chinese == english

    every([ROOT / "README.md", *map(PAGES.get, ENGLISH)], check)


def test_the_tables_of_engines_are_what_their_tests_saw():
    for language, page in engines.PAGES.items():
        told = "PYTHONPATH=tests python -m strangers.engines"
        assert page.read_text(encoding="utf-8") == engines.written(language), told


def anchors(path):
    """The anchors of a page: written ones, those of headings, and on a Chinese page the English."""
    both = [path, path.with_name(path.name.replace(".zh.md", ".md"))]
    text = "\n".join(one.read_text(encoding="utf-8") for one in both)
    headings = re.findall(r"^#+ (.+?)(?: *\{[^}]*\})?$", text, re.M)
    plain = (re.sub(r"`|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {*re.findall(r'(?:id="| #)([\w-]+)', text), *(SLUG(one, "-") for one in plain)}


def test_links_of_the_sources_lead_somewhere():
    """Those to pages that are made when the site is built are followed nightly."""

    def check(name, path):
        text = path.read_text(encoding="utf-8")
        prose = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", text, flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            made = target.name.replace(".zh.md", ".md") in GENERATED or "api" in target.parts
            if not parts.scheme and not made:
                assert target.exists(), link
                if parts.fragment and target.suffix == ".md":
                    assert unquote(parts.fragment) in anchors(target), link

    every(PAGES.items(), check)


# ---- the built site -------------------------------------------------------------------------


class Read(HTMLParser):
    """What a page of HTML links to and loads, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loads = set(), [], []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href") is not None:
            self.links.append(found["href"])
        if found.get("src"):
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") not in ("canonical", "alternate", "next", "prev"):
            self.loads.append(found["href"])


built = pytest.mark.slow
"""The site is built in two languages, and asked about, nightly."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=250, check=False,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if not line.startswith("INFO")]
    assert done.returncode == 0, "\n".join(told)
    return {path.relative_to(folder).as_posix(): Read(path) for path in folder.rglob("*.html")}


@pytest.fixture(scope="module")
def folder(site, tmp_path_factory):
    return next(tmp_path_factory.getbasetemp().glob("built*/site"))


@built
def test_every_page_is_built_in_both_languages(site):
    built = {name.removesuffix(".html") for name in site} - {"404"}
    english = {name for name in built if not name.startswith("zh/")}
    assert english >= {name.removesuffix(".md") for name in [*ENGLISH, *GENERATED]}
    assert {name.removeprefix("zh/") for name in built if name.startswith("zh/")} == english
    for name in english:
        assert '<html lang="zh"' in site[f"zh/{name}.html"].text
        assert site[f"zh/{name}.html"].text != site[f"{name}.html"].text


@built
def test_every_link_leads_somewhere(site, folder):
    wrong = []
    for name, page in site.items():
        if name == "404.html":
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                if not re.fullmatch(r"https://[\w.-]+(/\S*)?|mailto:\S+@\S+", link):
                    wrong.append((name, link))
                continue
            path = (folder / name).parent / unquote(parts.path) if parts.path else folder / name
            if path.is_dir():
                path /= "index.html"
            target = path.resolve()
            if not target.exists():
                wrong.append((name, link))
            elif parts.fragment and target.suffix == ".html":
                anchors = site[target.relative_to(folder.resolve()).as_posix()].anchors
                if unquote(parts.fragment) not in anchors:
                    wrong.append((name, link))
    assert not wrong, wrong[:20]


@built
def test_nothing_is_loaded_from_elsewhere(site, folder):
    for name, page in site.items():
        for source in page.loads:
            parts = urlsplit(source)
            assert not parts.scheme or parts.scheme == "data", (name, source)
            assert not parts.netloc, (name, source)
            if name != "404.html" and parts.path:
                assert ((folder / name).parent / unquote(parts.path)).exists(), (name, source)
    for path in [*folder.glob("stylesheets/*"), *folder.glob("javascripts/*")]:
        assert not re.search(r"https?://(?!www\.w3\.org)", path.read_text("utf-8")), path.name


@built
def test_every_public_name_is_on_a_page_of_the_api(site):
    text = "".join(page.text for name, page in site.items() if name.startswith("api/"))
    shown = set(re.findall(r"<h2[^>]*>(.*?)<a", text, re.S))
    shown = {re.sub(r"<[^>]*>", " ", heading).split()[0] for heading in shown}
    names = {f"halfstep.{name}" for name in halfstep.__all__} - {
        "halfstep.optim", "halfstep.distributed", "halfstep.__version__",
    }  # fmt: skip
    names |= {f"halfstep.optim.{name}" for name in halfstep.optim.__all__}
    names |= {f"halfstep.distributed.{name}" for name in halfstep.distributed.__all__}
    assert names <= shown, sorted(names - shown)


def shown(text):
    """What a reader sees of HTML without blocks."""
    return re.sub("<[^>]*>", "", text)


@pytest.mark.parametrize("language", ["", "zh/"])
@built
def test_every_option_and_key_is_in_the_reference(site, language):
    commands, keys = (
        {html.unescape(shown(code)) for code in re.findall(r"<code[^>]*>(.*?)</code>", page.text)}
        for page in (site[f"{language}commands.html"], site[f"{language}configuration.html"])
    )
    for name, kind in COMMANDS.items():
        runs = issubclass(kind, BaseConfig)
        own = {option.key for option in options_of(kind)} if runs else set()
        for action in parser_of(name)._actions:
            if action.dest in own:
                assert action.dest in keys, (name, action.dest)
            elif action.dest not in ("help",):  # of every command
                assert {option_name(action.dest), action.dest.upper()} & commands, action.dest
        if language:
            assert f'id="{name.replace(" ", "-")}"' in site["zh/commands.html"].text


@built
def test_the_search_has_its_index_without_a_server(folder):
    index = (folder / "search" / "search_index.json").read_text(encoding="utf-8")
    script = (folder / "search" / "search_index.js").read_text(encoding="utf-8")
    assert script == f"var __index = {index}"
