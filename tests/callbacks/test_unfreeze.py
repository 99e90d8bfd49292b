import copy

import pytest
import torch

from regimen.callbacks.support import CallbackError
from regimen.callbacks.unfreeze import Unfreeze, set_trainable
from regimen.trainer.callback import Callback

# The model: 0 Linear, 1 BatchNorm, 2 ReLU, 3 Linear; 5 updates an epoch.
STAGES = {"norm": {"pattern": "1.*", "epoch": 1}, "first": {"pattern": "0.*", "step": 7}}


class Moves(Callback):
    """Note which parameters each update changed, and whether BatchNorm's statistics moved."""

    def __init__(self):
        self.moved = []

    def on_fit_start(self, trainer):
        self._before = copy.deepcopy(trainer.model.state_dict())

    def on_update_end(self, trainer):
        now = trainer.model.state_dict()
        changed = {name for name, v in now.items() if not torch.equal(v, self._before[name])}
        self.moved.append(changed - {"0.bias", "1.num_batches_tracked"})
        self._before = copy.deepcopy(now)


HEAD = {"3.weight", "3.bias"}
STATISTICS = {"1.running_mean", "1.running_var"}
NORM = {"1.weight", "1.bias"}
FIRST = {"0.weight"}  # its bias means nothing in front of a BatchNorm: it may stay


def test_stages_begin_at_their_epoch_and_step(make_trainer):
    moves = Moves()
    trainer = make_trainer({"unfreeze": Unfreeze(STAGES), "moves": moves})
    for group in trainer.optimizers.groups():
        group.options["weight_decay"] = 0.1  # frozen parameters see none
    trainer.fit()

    second_stage = HEAD | NORM | STATISTICS
    last_stage = second_stage | FIRST

    assert moves.moved[:5] == [HEAD] * 5
    assert moves.moved[5:7] == [second_stage] * 2
    assert moves.moved[7:] == [last_stage] * 3


def test_first_match_decides_and_neither_means_never(make_trainer):
    moves = Moves()
    stages = {
        "dropped": None,
        "head": {"pattern": "3.*", "epoch": 0},
        "rest": {"pattern": "*"},
    }
    trainer = make_trainer({"unfreeze": Unfreeze(stages), "moves": moves})
    trainer.fit()

    assert moves.moved == [HEAD] * 10
    assert not trainer.model[1].training


MISTAKES = {
    r"a\.pattern=9\.\*: matches no": {"a": {"pattern": "9.*", "epoch": 1}},
    r"b\.pattern=0\.\*: matches no": {"a": {"pattern": "*"}, "b": {"pattern": "0.*"}},
    r"stages\.a=\{'epoch': 1\}: give pattern": {"a": {"epoch": 1}},
    r"'step': 2\}: .* one of epoch and step": {"a": {"pattern": "*", "epoch": 1, "step": 2}},
    r"'epochs': 1\}: .* one of epoch and step": {"a": {"pattern": "*", "epochs": 1}},
    r"stages\.a=\{'pattern': 5\}: give pattern": {"a": {"pattern": 5}},
    r"'epoch': 'two'\}: give pattern": {"a": {"pattern": "*", "epoch": "two"}},
    r"stages\.a=3: give pattern": {"a": 3},
    r"stages\.last: the model was built with": {"last": {"pattern": "3.*"}},
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_are_named(make_trainer, said):
    stages = MISTAKES[said]

    def fit():
        trainer = make_trainer({"unfreeze": Unfreeze(stages)})
        trainer.model[3].weight.requires_grad_("last" not in stages)
        trainer.fit()

    with pytest.raises(CallbackError, match=said):
        fit()


def test_a_compiled_model_trains_what_is_unfrozen():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    compiled = torch.compile(model, dynamic=False, backend="aot_eager")
    weight = model[0].weight

    def has_gradient(trains):
        set_trainable(model, [weight], trains)
        loss = compiled(torch.ones(2, 3)).sum()
        loss.backward()
        return weight.grad is not None

    found = [has_gradient(trains) for trains in (False, False, True, False, True)]
    names = [name for name, _ in model.named_parameters()]

    assert found == [False, False, True, False, True]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
