"""The file of a detector is compared with the model, also where boxes have equal scores."""

import pytest
import torch

from regimen.trainer.errors import ModelError
from regimen.trainer.export.boxes import box_difference
from regimen.trainer.export.formats import Exportable


def answers(moved):
    """Return a function that answers a picture with two boxes; those of `moved` pictures differ."""

    def answer(picture):
        number = int(picture.max())
        boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [2.0, 2.0, 8.0, 8.0]])
        if number in moved:
            boxes += 1
        return boxes, torch.tensor([0.5, 0.5]), torch.tensor([0, 0])

    return answer


@pytest.mark.parametrize(
    ("moved", "said"),
    [
        pytest.param((), None, id="equal"),
        pytest.param((1,), None, id="one undecided"),
        pytest.param((0, 1, 2), "cannot be compared with the model: in all of 3", id="all moved"),
    ],
)
def test_a_file_may_suppress_another_box_of_equal_score_but_not_in_all_pictures(moved, said):
    pictures = torch.arange(1.0, 3.0).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    graph = Exportable(answers(()), pictures, {"format": "onnx", "verified": {}})

    if said is None:
        assert box_difference(graph, answers(moved)) == 0
        count = 3 - len(moved)
        assert graph.facts["verified"] == {"pictures": count, "boxes": 2 * count}
    else:
        with pytest.raises(ModelError, match=said):
            box_difference(graph, answers(moved))
