"""Names that are filled in once the length of the training is known."""

import pytest

from conf.reserved import fill

VALUES = {"total_steps": 120, "steps_per_epoch": 10}


@pytest.mark.parametrize(
    ("node", "filled"),
    [
        pytest.param("${total_steps}", 120, id="alone-it-is-the-number"),
        pytest.param("0.3 * ${total_steps}", "0.3 * 120", id="within-text-its-digits"),
        pytest.param({"a": ["${steps_per_epoch}", 1.5, None]}, {"a": [10, 1.5, None]}, id="nested"),
        pytest.param("${total_step}", "${total_step}", id="another-name-stays"),
        pytest.param("\\d+${total_steps}", "\\d+120", id="backslashes-stay"),
    ],
)
def test_fill(node: object, filled: object) -> None:
    assert fill(node, VALUES) == filled


def test_a_name_without_a_value_stays_open() -> None:
    assert fill("${total_steps}", {"steps_per_epoch": 1}) == "${total_steps}"


def test_the_original_is_not_changed() -> None:
    node = {"a": ["${total_steps}"]}
    fill(node, VALUES)
    assert node == {"a": ["${total_steps}"]}
