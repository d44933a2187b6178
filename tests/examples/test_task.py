"""Tasks, prompts and rewards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("reasoning_gym", reason="the demo's tasks need the extra: pip install ds_hilore[demo]")

from arithmetic.task import INSTRUCTION, ArithmeticTasks, TaskConfig, as_prompt, final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6", "6"),
        ("3 + 4 = 7.", "7"),
        ("It is -12, surely", "-12"),
        ("9-4", "4"),
        ("9 - 14 = -5", "-5"),
        ("1,024", "1,024"),
        ("one of 3, 4,", "4"),
        ("7.50 dollars", "7.50"),
        ("seven", None),
        ("", None),
    ],
)
def test_final_number_is_the_last_one_as_written(text: str, number: str | None) -> None:
    assert final_number(text) == number


def test_the_right_answer_is_worth_1_and_a_wrong_one_less() -> None:
    tasks = ArithmeticTasks()
    for task in tasks.draw(0, 20):
        answer = task.entry["answer"]
        assert tasks.reward(task, answer) == 1
        assert tasks.reward(task, f"We get {answer}.") == 1
        assert tasks.reward(task, f"{answer} is what I would say, but it is {int(answer) + 1}") < 1
        assert tasks.reward(task, "no idea") == 0


def test_tasks_are_reproducible_and_mixed() -> None:
    first, second = (ArithmeticTasks(TaskConfig(seed=3)).draw(5, 30) for _ in range(2))
    assert [task.question for task in first] == [task.question for task in second]
    assert {task.entry["metadata"]["source_dataset"] for task in first} == {"chain_sum", "products"}
    assert [t.question for t in first] != [t.question for t in ArithmeticTasks(TaskConfig(seed=4)).draw(5, 30)]


def test_draws_of_ranks_continue_each_other() -> None:
    tasks = ArithmeticTasks()
    whole = [task.question for task in tasks.draw(0, 4)]
    assert whole == [task.question for first in (0, 2) for task in tasks.draw(first, 2)]


def test_drawing_goes_round() -> None:
    tasks = ArithmeticTasks(TaskConfig(size=3))
    drawn = [task.question for task in tasks.draw(0, 6)]
    assert drawn[:3] == drawn[3:]


def test_prompt_is_plain_text_without_a_chat_template() -> None:
    (task,) = ArithmeticTasks().draw(0, 1)
    assert as_prompt(task, SimpleNamespace(chat_template=None)) == f"{INSTRUCTION}\n{task.question}\n"
