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
    "NonFiniteError": (3, ArithmeticError),
    "SpikeError": (3, ArithmeticError),
    "PeerError": (1, RuntimeError),
}
WITH_CAUSE = ("NonFiniteError", "SpikeError")


def test_the_table_above_names_every_error():
    own = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert own == set(CODES)


@pytest.mark.parametrize("name", CODES)
def test_family_builtin_parent_and_exit_code(name):
    error = getattr(errors, name)
    code, parent = CODES[name]
    assert issubclass(error, errors.HalfstepError)
    assert issubclass(error, parent)
    assert error.exit_code == code


def test_nonfinite_error_carries_its_cause_and_parameters():
    error = errors.NonFiniteError("text", cause="gradients", parameters=("a", "b"))
    assert (str(error), error.cause, error.parameters) == ("text", "gradients", ("a", "b"))
    assert errors.NonFiniteError("text", cause="forward").parameters == ()
    with pytest.raises(TypeError):
        errors.NonFiniteError("text")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", [name for name in CODES if name not in WITH_CAUSE])
def test_plain_errors_survive_pickling(name):
    error = pickle.loads(pickle.dumps(getattr(errors, name)("text")))
    assert (type(error).__name__, str(error)) == (name, "text")


def test_nonfinite_error_survives_pickling():
    # A worker process hands its error to the parent by pickling it.
    error = errors.NonFiniteError("text", cause="skip_limit", parameters=("a",))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.cause, copy.parameters) == ("text", "skip_limit", ("a",))


def test_a_spike_error_keeps_its_cause_through_pickling():
    copy = pickle.loads(pickle.dumps(errors.SpikeError("text", cause="loss_spike")))
    assert (type(copy), str(copy), copy.cause) == (errors.SpikeError, "text", "loss_spike")
