"""The texts that training keeps for the server's page."""

from training.run.finish import LONGEST_EXAMPLE, MOST_EXAMPLES, examples_by_label
from training.tasks.task import RowAnswer


def _answer(label: str, predicted: str) -> RowAnswer:
    return RowAnswer(label, predicted, certainty=0.9, surprise=0.9 * (label != predicted))


def test_each_label_gets_a_text_that_the_model_answers_right_and_that_is_as_long_as_a_headline() -> None:
    texts = ["short", "right and " + "x" * 70, "wrong but " + "y" * 70, "nobody answers this one right"]
    answers = [_answer("a", "a"), _answer("a", "a"), _answer("a", "b"), _answer("b", "a")]

    assert examples_by_label(texts, answers) == {"a": texts[1], "b": texts[3]}


def test_a_label_with_long_texts_only_gets_none_and_many_labels_get_few() -> None:
    labels = [f"label {number}" for number in range(2 * MOST_EXAMPLES)]
    long, answers = "z" * (LONGEST_EXAMPLE + 1), [_answer(label, label) for label in labels]

    assert examples_by_label([long] * len(labels), answers) == {}
    assert len(examples_by_label(labels, answers)) == MOST_EXAMPLES
