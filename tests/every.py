"""A product of cases as one test: all of them run, and every failure is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def every(cases: Iterable[Any], check: Callable[..., object]) -> None:
    """Call ``check`` with each case, a tuple being its arguments; fail with all that failed."""
    cases, failed = [*cases], []
    assert cases, "there is no case"
    for case in cases:
        try:
            check(*case) if type(case) is tuple else check(case)
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{case}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} of {len(cases)} failed\n" + "\n".join(failed)
