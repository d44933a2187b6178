"""Faults that tests of their own prove; they are counted, and not tried again here."""

from __future__ import annotations

_ONE = "tests/integration/test_one_rank_fails.py::"
_CHECKS = "tests/integration/test_gradient_checks.py::"
_PLANE = "tests/integration/test_control_plane.py::"
_UNIT = "tests/recovery/test_unit.py::"
_STORE = "tests/profiling/test_store.py::"
_RESUME = "tests/integration/test_resume.py::"
_CALIBRATION = "tests/integration/test_calibration_stored.py::"

#: What goes wrong -> the test.
ELSEWHERE: dict[str, str] = {
    "a pass of calibration or an audit without memory": f"{_CHECKS}test_a_check_without_memory_is_dropped_by_all_ranks",
    "a pass of calibration or an audit without memory, on one rank": (
        f"{_CHECKS}test_a_check_without_memory_on_one_rank_is_dropped_by_all"
    ),
    "a pass of calibration, a judgement or an audit that raises on one rank": (
        f"{_ONE}test_a_check_that_fails_on_one_rank_is_known_to_all_before_they_step"
    ),
    "a microbatch of NaN while codecs are calibrated": (
        f"{_CHECKS}test_a_microbatch_that_is_no_number_says_nothing_of_codecs"
    ),
    "a codec that overflows while it is calibrated": (
        f"{_CHECKS}test_state_that_overflows_when_encoded_closes_its_place"
    ),
    "an exception on one rank while reductions overlap backward": f"{_ONE}test_reductions_that_overlap_backward",
    "an optimizer that raises, by the gradients it leaves": (
        f"{_ONE}test_an_optimizer_that_raises_leaves_no_gradients_behind"
    ),
    "memory short by the meter, in forward and before backward": (
        "tests/integration/test_guard.py::test_short_by_the_meter"
    ),
    "a second derivative through units": f"{_UNIT}test_second_derivatives_are_exact_too",
    "a saved bias or buffer that is written before backward": (
        f"{_UNIT}test_r5_a_replay_refuses_changed_state_that_nobody_saved"
    ),
    "a unit that catches what its replay raises": (
        "tests/recovery/test_replay.py::test_a_mismatch_that_the_unit_catches_is_raised_all_the_same"
    ),
    "a rank that comes late": f"{_PLANE}test_a_late_rank_is_given_up_and_named_and_both_ranks_fail",
    "a rank that dies in an exchange": f"{_PLANE}test_a_dead_rank_ends_in_an_error_on_the_other_and_not_in_a_hang",
    "ranks at different questions": f"{_PLANE}test_ranks_at_different_questions_both_hear_both_names",
    "a rank that dies under MPI": "tests/integration/test_mpi.py::test_a_rank_that_dies_ends_the_job",
    "a rank that never comes under MPI": "tests/integration/test_mpi.py::test_a_rank_that_never_comes_ends_the_job",
    "any byte of a profile flipped": f"{_STORE}test_no_flipped_byte_raises",
    "a profile of another user": f"{_STORE}test_another_users_file_is_not_read",
    "a profile whose words would forge lines of the log": f"{_STORE}test_a_file_cannot_write_into_the_log",
    "a stored calibration that is damaged": f"{_CALIBRATION}test_a_damaged_file_is_named_and_rebuilt",
    "a stored calibration of other weights": f"{_CALIBRATION}test_slopes_of_other_weights_are_not_taken_for_true",
    "an update of a pipeline that broke": (
        "tests/integration/test_pipeline.py::test_an_update_that_broke_cannot_begin_again"
    ),
    "any order of forwards, backwards, steps and exceptions": (
        "tests/runtime/test_controller.py::test_any_order_of_calls_gives_plain_gradients"
    ),
    "any order of what hosts do with an engine, resumed runs among it": (
        "tests/stateful/test_machine.py::test_any_order_of_what_hosts_do_gives_the_plain_updates"
    ),
    "what was measured is damaged in a checkpoint": (f"{_RESUME}test_a_damaged_file_costs_measuring_and_no_run"),
    "what was measured cannot be written beside a checkpoint": (
        f"{_RESUME}test_a_checkpoint_stands_where_ours_cannot_be_written"
    ),
    "a checkpoint of another ZeRO stage or world size": f"{_RESUME}test_another_zero_stage_is_named_and_measured_anew",
    "an answer of the planner's process that would run code": (
        "tests/planning/test_apart.py::test_only_records_of_the_planner_can_travel"
    ),
}
