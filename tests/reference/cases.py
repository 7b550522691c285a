"""One test over a table of cases: each is tried, and all that fail are told at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def every_case(cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Make one test of a check and its cases; a tuple is all of its arguments, else the one."""
    table = list(cases)

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        def test() -> None:
            failed = []
            for case in table:
                try:
                    check(*(case if isinstance(case, tuple) else (case,)))
                except (Exception, pytest.fail.Exception) as error:  # told below, with the others
                    failed.append(f"{str(case)[:200]}: {type(error).__name__}: {error}")
            assert table, "there is no case"
            assert not failed, f"{len(failed)} of {len(table)}:\n" + "\n".join(failed)

        functools.update_wrapper(test, check)
        del test.__wrapped__  # pytest would look at the check's arguments for fixtures
        return test

    return decorate
