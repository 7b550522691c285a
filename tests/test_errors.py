"""Errors: one family, exit codes for the shell, and causes for programs."""

import pickle

import pytest

from halfstep import errors

CODES = {
    "HalfstepError": (2, Exception),
    "ConfigError": (2, ValueError),
    "PrecisionError": (2, ValueError),
    "DataError": (2, ValueError),
    "CheckpointError": (2, RuntimeError),
    "StorageError": (75, RuntimeError),
    "NonFiniteError": (3, ArithmeticError),
    "SpikeError": (3, ArithmeticError),
    "PeerError": (1, RuntimeError),
    "PartedError": (1, ValueError),
}
WITH_CAUSE = ("NonFiniteError", "SpikeError")


def test_the_table_above_names_every_error():
    own = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__ and name[0] != "_"
    }
    assert own == set(CODES)


def test_family_builtin_parent_and_exit_code():
    for name, (code, parent) in CODES.items():
        error = getattr(errors, name)
        assert issubclass(error, errors.HalfstepError)
        assert issubclass(error, parent), name
        assert error.exit_code == code, name


def test_nonfinite_error_carries_its_cause_and_parameters():
    error = errors.NonFiniteError("text", cause="gradients", parameters=("a", "b"))
    assert (str(error), error.cause, error.parameters) == ("text", "gradients", ("a", "b"))
    assert errors.NonFiniteError("text", cause="forward").parameters == ()
    with pytest.raises(TypeError):
        errors.NonFiniteError("text")  # type: ignore[call-arg]


def test_errors_survive_pickling():
    """A worker process hands its error to the parent by pickling it."""
    for name in CODES:
        more = {"cause": "skip_limit"} if name in WITH_CAUSE else {}
        more |= {"parameters": ("a",)} if name == "NonFiniteError" else {}
        copy = pickle.loads(pickle.dumps(getattr(errors, name)("text", **more)))
        assert (type(copy).__name__, str(copy)) == (name, "text")
        assert {key: getattr(copy, key) for key in more} == more
