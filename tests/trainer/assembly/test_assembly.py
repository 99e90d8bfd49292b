"""From a configuration to parts and data: mistakes are found without data, and all at once.

Single mistakes are rows of tests/mistakes.yaml.
"""

import functools
import random
import re
from collections import Counter

import numpy as np
import pytest
import torch

from regimen.callbacks.checkpoint import Checkpoint
from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.conf.yaml_file import dump
from regimen.data.errors import ClassNamesError
from regimen.data.formats.table import table
from regimen.data.scenes import DigitScenes
from regimen.data.sources import Digits, ImageTensors
from regimen.data.tabular import Diabetes
from regimen.data.transforms import Pipeline, ToFloat
from regimen.models.mlp import MLP
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.assembly.data import (
    build_data,
    data_facts,
    device_cache_bytes,
    follow_names,
    set_cache,
)
from regimen.trainer.assembly.experiment import build
from regimen.trainer.assembly.parts import with_classes
from regimen.trainer.lr_schedulers.schedule import LRSchedule
from regimen.trainer.rng import seed_everything
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.classification import Classification

FOLDS = 3

DRAWN = """
import random, numpy, torch
class Drawn(list):
    def __init__(self, n):
        drawn = [random.random(), numpy.random.rand(), torch.rand(()).item()]
        super().__init__([(torch.tensor(drawn), 0)] * n)
"""


def composed(*typed):
    return parse(compose(["experiment=resnet18", "model=mlp", *typed]).config)


def pictures(names):
    images = torch.arange(len(names)).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).to(torch.uint8)
    return ImageTensors(images, torch.arange(len(names)), names)


def rows(folder, names):
    path = folder / "t.csv"
    path.write_text("x,kind\n" + "".join(f"{i},{n}\n" for i, n in enumerate(names)))
    cuts = {"val_fraction": 0.0, "test_fraction": 0.0}
    return table(str(path), "train", "kind", "class", **cuts)


@pytest.mark.parametrize("own", [["b"], ["c", "a"], ["b", "a", "c"], ["a", "b"]], ids="".join)
def test_numbers_of_classes_follow_the_names_of_a_run(tmp_path, own):
    run = ["a", "b", "c"]
    for dataset in (pictures(own), rows(tmp_path, own)):
        follow_names(dataset, run, "data.test")
        expected = [run.index(name) for name in own]
        assert dataset.classes == run
        assert [label for _, label in dataset] == expected
        assert dataset.batch([0])[1].tolist() == expected[:1]
        assert dataset.tensors()[1].tolist() == expected
        assert data_facts({"test": dataset})["classes"] == run


@pytest.mark.parametrize(
    ("opened", "told"),
    [
        (lambda: pictures(["b", "x"]), "'x' among them: it has 2 ('b', 'x'), the run 2 ('a', 'b')"),
        (lambda: DigitScenes("test", target="present"), "'0', '1', '2', '3', '4' among them"),
        (lambda: DigitScenes("test", target="mask"), "'paper', "),
        (lambda: Named(["b", "a"]), "in another order"),
    ],
    ids=["pictures", "labels", "masks", "of one's own"],
)
def test_other_names_of_classes_are_refused(opened, told):
    with pytest.raises(ClassNamesError) as caught:
        follow_names(opened(), ["a", "b"], "data.test")
    assert str(caught.value).startswith("data.test: its classes are not those that the run")
    assert told in str(caught.value)
    assert caught.value.exit_code == 3


class Named(list):
    def __init__(self, classes):
        super().__init__([(torch.zeros(1), 0)])
        self.classes = classes


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, inputs, sizes):
        super().__init__()
        self.head = nn.Linear(inputs, sizes[0])

    def forward(self, inputs):
        return self.head(inputs.flatten(1))

class Bare:
    def __init__(self, split):
        self.x = torch.randn(30, 4)

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return self.x[index], index % 3

class Named(Bare):
    classes = ["a", "b", "c"]

class Labelled(Bare):
    targets = torch.arange(30) % 3
"""
OF_OWN = """
# @package _global_
defaults:
  - override /transforms: none
model: {_target_: my_brought.Net, inputs: 4, sizes: ["${data.num_classes}"]}
data:
  train: {_target_: my_brought.Named, split: train}
callbacks:
  mine:
    _target_: regimen.callbacks.early_stopping.EarlyStopping
    monitor: train/epoch_loss
    mode: min
    patience: ${data.num_classes}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return what composes an experiment with data of its own, beside the group of the digits."""
    (tmp_path / "my_brought.py").write_text(OWN)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# train experiment=mine{OF_OWN}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def words(*typed):
        mine = ["--config-dir", str(tmp_path), "--allow-target", "my_brought", "experiment=mine"]
        return compose([*mine, *typed])

    return words


@pytest.mark.parametrize("kind", ["Named", "Labelled"])
def test_classes_are_those_of_the_data_set_that_an_experiment_brings(own, kind):
    found = own(f"data.train._target_=my_brought.{kind}").config
    assert found["data"]["num_classes"] is None
    assert found["task"]["num_classes"] is None

    config = parse(found)
    check_targets(config)
    experiment = build(config)

    assert experiment.trainer.model.head.out_features == 3
    assert experiment.trainer.task.num_classes == 3
    assert experiment.trainer.callbacks["mine"].patience == 3
    assert experiment.data.num_classes == 3


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        pytest.param(
            "data.num_classes=5",
            "is 5, but data.train has 3 classes: a, b, c; set data.num_classes",
            id="too many",
        ),
        pytest.param("data.num_classes=2", "is 2, but data.train has 3 classes", id="too few"),
        pytest.param(
            "data.train._target_=my_brought.Bare",
            "is null, and there is nothing to count",
            id="nothing to count",
        ),
    ],
)
def test_a_contradiction_or_nothing_to_count_is_refused(own, typed, told):
    config = parse(own(typed).config)
    with pytest.raises(ConfigError, match=re.escape(f"data.num_classes: {told}")):
        build(config)


def test_a_number_of_classes_stands_for_what_cannot_be_counted(own):
    bare = own("data.train._target_=my_brought.Bare", "data.num_classes=4").config
    experiment = build(parse(bare))
    assert experiment.trainer.model.head.out_features == 4


def test_a_counted_number_is_stored_open_and_read_again(own, tmp_path):
    found = own().config
    assert found["model"]["sizes"] == ["${data.num_classes}"]

    (tmp_path / "config.yaml").write_text(dump(found))
    stored = ["--config-dir", str(tmp_path), "--config-name", "config"]
    again = compose([*stored, "--allow-target", "my_brought"])

    assert again.config == found


def test_a_number_that_is_given_is_stored_as_it_is(own):
    found = own("data.num_classes=3").config
    assert found["model"]["sizes"] == [3]


def test_a_typed_group_of_data_wins_over_the_data_sets_of_an_experiment(own, tmp_path):
    mine = tmp_path / "experiment" / "mine.yaml"
    train = "train: {_target_: my_brought.Named, split: train}"
    others = (
        "\n  val: {a: {_target_: my_brought.Named, split: val}}\n  test: null\n  on_error: skip"
    )
    text = mine.read_text()

    assert train in text

    mine.write_text(text.replace(train, train + others))

    def data_of(*typed):
        return own(*typed).config["data"]

    digits = compose(["experiment=resnet18"]).config["data"]

    assert data_of()["val"].keys() == {"a"}
    assert data_of("data=digits") == {**digits, "on_error": "skip"}

    found = data_of("data=digits", "data.train._target_=my_brought.Named")
    assert found["train"] == {"_target_": "my_brought.Named", "split": "train"}

    mine.write_text(text.replace(train, others))  # without a data set to train on
    assert data_of("data=digits")["val"] == digits["val"]


def test_a_data_set_without_names_or_with_the_runs_stays_as_it_is():
    follow_names(Named(None), ["a"], "data.test")
    follow_names(Named(["a"]), ["a", "b"], "data.test")
    follow_names(Named(["a", "b"]), None, "data.test")


SORTED = """
class Sorted(list):
    def __init__(self, classes):
        self.classes = classes
"""


def test_where_a_run_begins_other_names_are_not_those_of_train(tmp_path, monkeypatch):
    (tmp_path / "my_sorted.py").write_text(SORTED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = composed(
        "transforms=none",
        "data.train={_target_: my_sorted.Sorted, classes: [a, b]}",
        "data.val={_target_: my_sorted.Sorted, classes: [b, a]}",
        "data.test={_target_: my_sorted.Sorted, classes: [a, b]}",
    )

    with pytest.raises(ClassNamesError, match=r"not those of data\.train, in another"):
        build_data(config)
    with pytest.raises(ClassNamesError, match="not those that the run was trained on"):
        build_data(config, ["val"], ["a", "b"])


def drawn_from_all():
    """Draw from the generators of Python, NumPy and torch."""
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_what_a_data_set_draws_when_it_is_opened_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "my_drawn.py").write_text(DRAWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    splits = ("train", "val", "test")
    nodes = [f"data.{split}={{_target_: my_drawn.Drawn, n: 3}}" for split in splits]
    config = composed("transforms=none", *nodes)

    seed_everything(config.seed)
    before = drawn_from_all()
    seed_everything(config.seed)
    of_run = build_data(config).sets  # as a run opens them

    assert drawn_from_all() == before

    of_evaluation = build_data(config, ("test",)).sets  # whatever was drawn before
    train, val, test = [of_run[split][0][0].tolist() for split in splits]
    assert test == of_evaluation["test"][0][0].tolist()
    assert test != val
    assert val != train


@pytest.mark.parametrize(
    ("steps", "fits"),
    [
        pytest.param("c: {_target_: T.RandomCrop, size: 17}", False, id="a side"),
        pytest.param(
            "r: {_target_: T.Resize, size: 12}, c: {_target_: T.RandomCrop, size: 13}",
            False,
            id="resized",
        ),
        pytest.param("c: {_target_: T.RandomCrop, size: 20, padding: 2}", True, id="enough"),
    ],
)
def test_a_crop_larger_than_the_images_is_a_mistake_in_the_configuration(steps, fits):
    steps = steps.replace("T.", "torchvision.transforms.v2.")
    config = composed("transforms=none", f"transforms.train={{{steps}}}")
    if fits:
        build_data(config, ("train",))
    else:
        with pytest.raises(ConfigError, match=r"transforms\.train\.c failed: .*larger than"):
            build_data(config, ("train",))


def test_what_shows_only_in_the_object_cannot_be_kept_either():
    class Own(ImageTensors):
        def __getitem__(self, index):
            return self.images[index] / 2, 0

    config = composed("data.cache=device")
    own = Own(torch.zeros(2, 3, 4, 4), torch.zeros(2), [])
    with_a_function = Digits("val", transform=lambda image: image)
    to_float = Pipeline({"to_float": ToFloat()}, "transforms.eval")
    left_to_nobody = Digits("val", transform=to_float)

    with pytest.raises(ConfigError, match=r"data\.cache: is device, but data\.val \(Own\) cannot"):
        set_cache(config, "val", own)
    with pytest.raises(ConfigError, match=r"data\.val \(Digits\) cannot be kept there"):
        set_cache(config, "val", with_a_function)
    with pytest.raises(ConfigError, match=r"transforms\.eval\.to_float: ToFloat takes single"):
        set_cache(config, "val", left_to_nobody)


def test_the_plan_counts_what_is_kept(digit_photographs):
    config = composed("data.cache=device", "data.image_size=16")
    sets = build_data(config).sets
    samples = 1257 + 270 + 270

    assert device_cache_bytes(config, sets) == samples * (16 * 16 + 8)
    assert device_cache_bytes(composed(), sets) == 0


def test_the_plan_does_not_know_what_is_not_decoded_yet(digit_photographs):
    files = ["data=cifar10_folder", f"data.root={digit_photographs}", "data.cache=device"]
    config = parse(compose(["experiment=resnet18", *files, "dry_run=true"]).config)
    sets = build_data(config).sets
    assert device_cache_bytes(config, sets) is None


WOBBLES = """
from regimen.trainer.tasks.classification import Classification
class Wobbles(Classification):
    def metric_names(self):
        return [*super().metric_names(), "wobble"]
    def monitor(self):
        return "wobble"
class Says(Wobbles):
    def modes(self):
        return {"wobble": "min"}
"""


def test_a_direction_that_neither_the_task_nor_a_name_says_is_asked_for_before_data_are_read(
    tmp_path, monkeypatch
):
    (tmp_path / "my_wobbles.py").write_text(WOBBLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for typed in (
        [],
        ["callbacks.checkpoint.monitor=val/wobble"],
        ["callbacks.checkpoint.monitor=val/loss", "callbacks.early_stopping.patience=2"],
        ["callbacks=none", "lr_scheduler=plateau", "lr_scheduler.monitor=val/wobble"],
    ):
        with pytest.raises(ConfigError, match=r"a larger val/wobble better.* say mode=max or mode"):
            check_targets(composed("task._target_=my_wobbles.Wobbles", *typed))
        check_targets(composed("task._target_=my_wobbles.Says", *typed))


def sizes(*typed):
    """Return the number of samples of each data set."""
    config = parse(compose([*typed, "transforms=none"]).config)
    sets = build_data(config).sets
    return [len(dataset) for dataset in sets.values() if dataset is not None]


@pytest.mark.parametrize(
    "data", ["digits", "digits_noise", "digits_stream", "digit_masks", "diabetes"]
)
def test_train_and_val_are_shared_out_and_test_stays(data):
    pool = 376 if data == "diabetes" else 1527
    train, val, test = sizes(f"data={data}")
    assert train + val == pool

    validated = 0
    for fold in range(FOLDS):
        own_train, own_val, own_test = sizes(
            f"data={data}", f"data.fold={fold}", f"data.folds={FOLDS}"
        )
        assert own_train + own_val == pool
        assert own_test == test
        validated += own_val
    assert validated == pool


def test_folds_hold_every_sample_once():
    without_folds = len(Diabetes("val").targets) + len(Diabetes("train").targets)
    in_folds = 0
    for fold in range(FOLDS):
        in_folds += len(Diabetes("val", fold=fold, folds=FOLDS).targets)
    assert in_folds == without_folds


def test_folds_leave_the_test_samples_alone():
    """Targets are standardized by the training samples of a fold: their order is the same."""
    orders = []
    for fold in range(FOLDS):
        targets = Diabetes("test", fold=fold, folds=FOLDS).targets
        orders.append(targets.argsort(stable=True))
    for order in orders:
        assert torch.equal(order, orders[0])


def test_folds_are_stratified_and_follow_the_seed_of_the_split():
    val = Digits("val", 8, fold=1, folds=5)
    other = Digits("val", 8, split_seed=1, fold=1, folds=5)
    assert val.targets.bincount().min() >= 29
    assert not torch.equal(val.inputs, other.inputs)


def test_the_folds_of_a_folder_are_cut_from_train(tmp_path):
    for place in ("train/cat", "train/dog", "val/cat", "val/dog"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        for number in range(4):
            (folder / f"{number}.png").touch()
    given = ["data=image_folder", f"data.root={tmp_path}"]
    assert sizes(*given) == [8, 8]
    assert sizes(*given, "data.fold=1", "data.folds=4") == [6, 2]


LAMBDA = "lr_scheduler={_target_: torch.optim.lr_scheduler.LambdaLR, functions: my_own.fail}"


def check(*typed):
    check_targets(parse(compose(["experiment=resnet18", *typed]).config))


@pytest.mark.parametrize(
    "typed",
    [
        "model=mlp lr_scheduler=cosine +lr_scheduler/warmup=linear",
        "model=mlp data.cache=device",
        "model=mlp data.cache=device transforms=on_device",
        "experiment=segmentation data.cache=device",
        "task/metrics=per_class callbacks.checkpoint.monitor=val/accuracy_3",
        "task/metrics=per_class callbacks.checkpoint.monitor=val/accuracy_cat",
    ],
)
def test_what_can_be_built_passes(typed):
    check(*typed.split())


def test_mistakes_in_all_parts_are_listed_together():
    with pytest.raises(ConfigError) as caught:
        check(
            "+model.activation=rellu",
            "task.loss={_target_: torch.nn.MultiMarginLoss, p: 3}",
            "callbacks.early_stopping.mode=medium",
            "+transforms.train.crop={_target_: torchvision.transforms.v2.RandomCrop, size: []}",
            "+transforms.device.flip={_target_: torchvision.transforms.v2.Resize, size: [1,2,3]}",
        )
    assert {problem.key for problem in caught.value.problems} == {
        "model",
        "task.loss",
        "callbacks.early_stopping",
        "transforms.train.crop",
        "transforms.device.flip",
    }


USERS_CODE = """
import torch
from regimen.trainer.callback import Callback
def fail(step):
    raise LookupError(step)
class Short(Callback):
    def scalars(self): ...
class Filled(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.first = self.weight.sum().item()
class Odd(torch.nn.Linear):
    def __init__(self):
        raise OSError('no file')
"""


def test_the_users_code_is_met_as_in_a_run(tmp_path, monkeypatch):
    (tmp_path / "my_own.py").write_text(USERS_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(LookupError):  # a fault in a function is no mistake in the configuration
        check("model=mlp", LAMBDA)
    with pytest.raises(ConfigError, match=r"callbacks\.short: Short\.scalars must take \(self, t"):
        check("model=mlp", "+callbacks.short={_target_: my_own.Short}")

    for network in ("Filled", "Odd"):  # the run builds it, with storage
        check(f"model={{_target_: my_own.{network}}}", "callbacks.ema=null")


def test_a_check_and_a_run_build_each_part_once(monkeypatch):
    counts = Counter()

    def counted(cls, init):
        @functools.wraps(init)
        def construct(*args, **kwargs):
            counts[cls] += 1
            init(*args, **kwargs)

        return construct

    for cls in (MLP, Classification, torch.optim.SGD, Checkpoint, LRSchedule):
        monkeypatch.setattr(cls, "__init__", counted(cls, cls.__init__))
    config = parse(compose(["experiment=resnet18", "model=mlp", "optimizer=sgd"]).config)
    check_targets(config)
    build(config, Strategy("cpu"))

    assert counts[MLP] == 2
    assert counts[Classification] == 2
    assert counts[Checkpoint] == 2
    # Tried on stand-ins first: what a schedule is given, and which defaults an optimizer has.
    assert counts[LRSchedule] <= 4
    assert counts[torch.optim.SGD] <= 4


def test_an_open_number_of_classes_is_that_of_the_data():
    node = {"parts": [{"num_classes": None}], "num_classes": 3}
    assert with_classes(node, 7) == {"parts": [{"num_classes": 7}], "num_classes": 3}
    assert node["parts"] == [{"num_classes": None}]


NAMED = """
import torch
from regimen.data.sources import ImageTensors
class Named(ImageTensors):
    def __init__(self, names, transform=None):
        images = torch.randint(0, 256, (30, 1, 16, 16), dtype=torch.uint8)
        super().__init__(images, torch.arange(30) % 3, names, transform)
"""


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        pytest.param(["cat", "dog", "hair loss"], ["cat", "dog", "hair loss"], id="names"),
        pytest.param(["a/b", "c", "3"], ["a_b", "c", "3"], id="a slash"),
        pytest.param(["a", "a", "b"], ["0", "1", "2"], id="repeated"),
    ],
)
def test_metrics_of_classes_have_the_names_of_the_data(tmp_path, monkeypatch, names, keys):
    (tmp_path / "named_classes.py").write_text(NAMED)
    monkeypatch.syspath_prepend(tmp_path)
    node = f"{{_target_:named_classes.Named,names:{names}}}"
    typed = [
        "--allow-target",
        "named_classes",
        "task/metrics=per_class",
        "data.test=null",
        "data.num_classes=3",
        f"data.train={node}",
        f"data.val={node}",
    ]
    last = keys[-1]
    trainer = build(composed(*typed, f"callbacks.checkpoint.monitor='val/accuracy_{last}'")).trainer
    trainer.setup()
    logged = trainer.evaluate(trainer.val_loaders["val"], "val")

    assert {f"val/accuracy_{key}" for key in keys} <= logged.keys()
    assert trainer.callbacks["checkpoint"].improves(0.9, 0.8)

    unknown = composed(*typed, "callbacks.checkpoint.monitor=val/accuracy_cow")
    with pytest.raises(ConfigError, match=f"'val/accuracy_cow' is none of .*accuracy_{last}"):
        build(unknown)


def test_the_layout_of_images_is_refused_for_volumes():
    layer = "{_target_: torch.nn.Conv3d, in_channels: 1, out_channels: 2, kernel_size: 3}"
    typed = [f"model={layer}", "trainer.channels_last=true"]
    with pytest.raises(ConfigError, match=r"channels_last: is a layout of images, and weight"):
        check_targets(parse(compose(["experiment=resnet18", *typed]).config))
