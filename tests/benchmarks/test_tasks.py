"""Tasks of three kinds: drawn anew the same, scored by what counts of a response, and the expected score."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.tasks import KINDS, Question, Tasks, as_prompt, expected_score, right_answers, trimmed
from examples.arithmetic.model import Actor, Sequences
from tests import models


class Characters:
    """A tokenizer with a token for each character."""

    pad_token_id = 1

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[2 + ord(character) % (models.VOCAB - 2) for character in text])


@pytest.fixture(scope="module")
def tasks() -> Tasks:
    return Tasks(seed=3)


def test_kinds_come_in_turn_and_again_the_same(tasks: Tasks) -> None:
    drawn = tasks.draw(0, 7)
    assert [each.kind.name for each in drawn] == [list(KINDS)[index % 3] for index in range(7)]
    again = Tasks(seed=3).draw(2, 3)
    assert [each.text for each in again] == [each.text for each in drawn[2:5]]
    assert [each.text for each in Tasks(seed=4).draw(0, 7)] != [each.text for each in drawn]


def test_held_out_questions_are_not_drawn_first(tasks: Tasks) -> None:
    held_out = {each.entry["metadata"]["source_index"] for each in tasks.held_out(9)}
    drawn = {each.entry["metadata"]["source_index"] for each in tasks.draw(0, 300)}
    assert held_out.isdisjoint(drawn)


@pytest.mark.parametrize("index", range(6))
def test_the_right_answer_is_worth_one_and_what_follows_it_nothing(tasks: Tasks, index: int) -> None:
    (question,) = tasks.draw(index, 1)
    assert tasks.reward(question, f" {question.answer}") == 1.0
    assert tasks.reward(question, f" {question.answer}\n\nNo, 77") == 1.0
    assert tasks.reward(question, f" {question.answer.lower()}.") == 1.0
    assert tasks.reward(question, " ...") == 0.0
    assert tasks.reward(question, f" {wrong(question)} {question.answer}") < 0.5


def wrong(question: Question) -> str:
    return {"chain_sum": "4711", "spell_backward": "zzzz", "syllogism": "no" if question.answer == "Yes" else "yes"}[
        question.kind.name
    ]


def test_right_answers_end_where_the_longest_does(tasks: Tasks) -> None:
    drawn, words = tasks.draw(0, 6), Characters()
    found = right_answers(words, drawn)
    for row, question in enumerate(drawn):
        attended = found.input_ids[row][found.attention_mask[row].bool()].tolist()
        answer = found.input_ids[row, -found.response_mask.shape[1] :][found.response_mask[row]].tolist()
        assert attended == words(as_prompt(question)).input_ids + answer
        assert answer == words(f" {question.answer}").input_ids


def test_the_expected_score_is_the_mean_probability_of_right_answers(tasks: Tasks) -> None:
    found, policy = right_answers(Characters(), tasks.draw(0, 5)), Actor(models.lora(models.llama(layers=2)))
    with torch.no_grad():
        alone = [float(policy(*found.rows(slice(row, row + 1))).sum().exp()) for row in range(5)]
    assert expected_score(policy, found, rows=2) == pytest.approx(100 * sum(alone) / 5, rel=1e-5)
    assert policy.training


def test_padding_that_all_rows_have_goes_and_shapes_stay_few() -> None:
    attention = torch.tensor([[0] * 19 + [1] * 9, [0] * 21 + [1] * 7])
    ids = torch.arange(28).repeat(2, 1)
    shorter = trimmed(Sequences(ids, attention, torch.ones(2, 4, dtype=torch.bool)))
    assert shorter.input_ids.tolist() == ids[:, 16:].tolist()
    assert shorter.attention_mask.tolist() == attention[:, 16:].tolist()
    assert shorter.response_mask.shape == (2, 4)
