"""What the loop gives the step of a number is stored: a shift by one is another training."""

from gates import t6_killed_run_goes_on_bitwise as t6


def test_rate_windows_and_keys_of_every_step_are_the_stored_ones_from_the_start_and_resumed():
    assert t6.step_inputs("cpu") == {"step_inputs_differing": 0.0}
