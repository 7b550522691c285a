"""The dynamic loss scale against an account that rereads the whole history."""

from hypothesis import given, settings, strategies as st

from halfstep import LossScaleConfig
from halfstep.precision.scaling.loss_scale import LossScale
from reference.loss_scale import exponents

flags = st.lists(st.sampled_from([False, False, True]), max_size=60)


@st.composite
def configurations(draw):
    floor = draw(st.integers(0, 6))
    start = draw(st.integers(floor, 14))
    return {
        "start": start,
        "floor": floor,
        "ceiling": draw(st.integers(start, 18)),
        "grow_by": draw(st.integers(1, 4)),
        "back_off_by": draw(st.integers(1, 4)),
        "interval": draw(st.integers(1, 5)),
        "hysteresis": draw(st.integers(1, 4)),
    }


def make(c: dict[str, int]) -> LossScale:
    return LossScale(
        LossScaleConfig(
            kind="dynamic",
            init_scale=2.0 ** c["start"],
            min_scale=2.0 ** c["floor"],
            max_scale=2.0 ** c["ceiling"],
            growth_factor=2.0 ** c["grow_by"],
            backoff_factor=2.0 ** -c["back_off_by"],
            growth_interval=c["interval"],
            hysteresis=c["hysteresis"],
        )
    )


def run(scale: LossScale, history) -> list[float]:
    values = []
    for flag in history:
        scale.update(found_nonfinite=flag)
        values.append(scale.value)
    return values


@settings(max_examples=200)
@given(configurations(), flags)
def test_the_scale_is_what_the_whole_history_says(configuration, history):
    expected = [2.0**e for e in exponents(history, **configuration)]
    assert run(make(configuration), history) == expected


@settings(max_examples=100)
@given(configurations(), flags, flags)
def test_any_state_that_a_run_reaches_can_be_resumed(configuration, before, after):
    whole, first, second = (make(configuration) for _ in range(3))
    run(first, before)
    second.load_state_dict(first.state_dict())
    run(whole, before)
    assert run(second, after) == run(whole, after)
    assert second.state_dict() == whole.state_dict()
    assert second.at_floor == whole.at_floor


@settings(max_examples=100)
@given(configurations(), flags)
def test_at_floor_means_that_the_next_overflow_changes_nothing(configuration, history):
    scale = make(configuration)
    run(scale, history)
    value, at_floor = scale.value, scale.at_floor
    # The definition: at the floor, with no overflow left that would only be tolerated.
    last_era = exponents([*history, True], **{**configuration, "floor": -1000})[-1]
    free = exponents(history, **{**configuration, "floor": -1000})
    backs_off = last_era < (free[-1] if free else configuration["start"])
    assert at_floor == (value == 2.0 ** configuration["floor"] and backs_off)
    scale.update(found_nonfinite=True)
    if at_floor:
        assert scale.value == value
