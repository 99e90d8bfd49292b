"""A declared list of layers: built, traced, and a misfit named."""

import pytest
import torch
from torch import nn

from models.errors import NetworkError
from models.sequential import from_layers, trace


def layers(features: int = 32) -> list[nn.Module]:
    return [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.5), nn.Linear(features, 10)]  # fmt: skip


def test_a_list_becomes_the_sequential_written_by_hand() -> None:
    torch.manual_seed(0)
    model = from_layers(layers(), [1, 4, 4])
    torch.manual_seed(0)
    by_hand = nn.Sequential(*layers())
    x = torch.randn(2, 1, 4, 4)
    torch.testing.assert_close(model.eval()(x), by_hand.eval()(x), rtol=0, atol=0)


def test_a_mapping_keeps_names_drops_none_and_sizes_lazy_layers() -> None:
    model = from_layers({"flat": nn.Flatten(), "noise": None, "head": nn.LazyLinear(3)}, [2, 5])
    assert [name for name, _ in model.named_children()] == ["flat", "head"]
    assert model.head.weight.shape == (3, 10)


def test_a_head_of_the_classes_is_added() -> None:
    model = from_layers([nn.Flatten()], [2, 3], num_classes=4)
    assert isinstance(model.head, nn.Linear)
    assert (model.head.in_features, model.head.out_features) == (6, 4)


def test_the_trace_leaves_statistics_modes_and_chance_alone() -> None:
    model = nn.Sequential(*layers())
    model[5].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    shapes = trace(model, [1, 4, 4])
    assert shapes[0] == ("input", (1, 4, 4))
    assert shapes[4:6] == [("3", (8, 2, 2)), ("4", (32,))]
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True] * 5 + [False, True]


def test_a_misfit_names_the_layer_and_the_way_to_it() -> None:
    with pytest.raises(NetworkError, match=r"model\.layers\.6 \(Linear\(in_features=33") as caught:
        from_layers(layers(33), [1, 4, 4])
    assert "1x4x4 -> 0 8x4x4" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param([], "empty", id="empty"),
        pytest.param([nn.LSTM(4, 4)], "returns a tuple", id="tuple"),
    ],
)
def test_a_list_that_is_no_chain_is_refused(given: list[nn.Module], words: str) -> None:
    with pytest.raises(NetworkError, match=words):
        from_layers(given, [3, 4])
