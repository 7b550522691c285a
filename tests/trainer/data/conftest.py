"""Small files for every test; nothing outside tmp_path is read or written."""

import json

import pytest
from hypothesis import settings

# As in tests/properties: the same examples on every run, no files, and no failure because the
# machine was busy.
settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")


@pytest.fixture(autouse=True)
def no_cache_outside(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path):
    """Writes bytes, text, or JSON records (a list) and returns the path."""

    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(record) + "\n" for record in content)
        if isinstance(content, str):
            content = content.encode("utf-8")
        path.write_bytes(content)
        return path

    return write
