"""From a command line to a configuration."""

import importlib
import inspect
import shlex
from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir
from hydra.version import VersionBase

from regimen.conf import addresses
from regimen.conf.check import parse
from regimen.conf.errors import MOST_PROBLEMS, ConfigError, Problem
from regimen.conf.yaml_file import dump
from regimen.scripts.composition.compose import PLACES, compose
from regimen.scripts.composition.folders import CONF
from regimen.scripts.composition.overrides import identity
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.callback import Callback

EXPERIMENT = "# train experiment=mine\n# @package _global_\n"
OPEN = "model._target_=torchvision.models.resnet18"  # takes any argument
TASKS = "task._target_=regimen.trainer.tasks."
CHOSEN = "task/loss=weighted_sum"
MLP = "num_classes in_channels image_size activation hidden"
FAKE = "{_target_: torchvision.datasets.FakeData, size: 8}"


def composed(*argv):
    return compose(list(argv)).config


def refused(*argv):
    with pytest.raises(ConfigError) as caught:
        compose(list(argv))
    return str(caught.value)


@pytest.fixture
def mine(tmp_path):
    """Return a folder of the user's, with an experiment."""
    write(tmp_path, "experiment/mine.yaml", EXPERIMENT + "name: mine\n")
    return tmp_path


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


@pytest.fixture
def stored(tmp_path):
    """Return words that compose the configuration of a run, as the run has stored it."""

    def words(*argv):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "config.yaml").write_text(dump(composed(*argv)))
        return ["--config-dir", str(folder), "--config-name", "config"]

    return words


FOLDER = ("experiment=images", "data.root=here")
HOUSES = ("data=table", "data.path=a.csv", "data.target=price", "data.channels=3")


@pytest.mark.parametrize(
    ("run", "typed", "fed"),
    [
        (FOLDER, "data.root=other", "data.test.root=..., data.val.root=..., data.train.root=..."),
        (FOLDER, "data.split_seed=1", "data.val.split_seed=..., data.train.split_seed=..."),
        (FOLDER, "data.mean=[0.5,0.5,0.5]", "transforms.eval.normalize.mean=..."),
        (FOLDER, "data.image_size=32", "transforms.eval.resize.size.0=..."),
        (FOLDER, "data.channels=1", "data.test.channels=..."),
        (HOUSES, "data.path=b.csv", "data.test.path=..., data.val.path=..., data.train.path=..."),
        (HOUSES, "data.missing=mean", "data.test.missing=..., data.val.missing=..."),
        ((), "data.num_classes=3", "model.num_classes=..."),
        ((), "data.root=other", "no key takes its value from it"),
        (("data=shards", "data.root=a", "data.cache_dir=b"), "data.cache_dir=c", "data.test.cache"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_key_that_feeds_nothing_in_a_stored_run_is_refused(stored, run, typed, fed):
    words = stored(*run)
    key = typed.partition("=")[0]
    told = refused(*words, typed)
    assert f"{key}: feeds nothing in this run: " in told
    assert fed in told
    # What it is told to set, it can set; and a key with an effect of its own stays one.
    compose([*words, *(["data.test.root=other"] if run == FOLDER else []), "data.on_error=skip"])
    compose([*words, *run[1:]])


def test_groups_then_the_experiment_then_the_command_line():
    config = composed()
    assert (config["name"], config["model"]["_target_"]) == (
        "train",
        "regimen.models.small_cnn.SmallCNN",
    )
    assert config["model"]["num_classes"] == config["data"]["num_classes"]
    found = compose(["experiment=resnet18", "loader.batch_size=7", "lr_scheduler=one_cycle"])
    assert (found.config["name"], found.config["loader"]["batch_size"]) == ("resnet18", 7)
    assert found.config["trainer"]["max_epochs"] != 10
    assert found.choices["model"] == "resnet18"
    assert found.overrides[:2] == ["experiment=resnet18", "loader.batch_size=7"]
    assert found.config["lr_scheduler"]["total_steps"] == "${total_steps}"  # known later
    swapped = ["model=mlp", "~lr_scheduler", "callbacks=[default,ema]"]
    config = composed("experiment=resnet18", *swapped)
    assert config["model"]["_target_"] == "regimen.models.mlp.MLP"
    assert "depth" not in config["model"]
    assert {"checkpoint", "ema"} <= config["callbacks"].keys()
    assert config["lr_scheduler"] is composed("lr_scheduler=null")["lr_scheduler"] is None


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["model.dropout=0.5"], "dropout", 0.5),
        (["+model.dropout=0.5"], "dropout", 0.5),  # although it exists
        ([OPEN, "+model.extra={a: [1, x]}"], "extra", {"a": [1, "x"]}),
        ([OPEN, "model.extra=1"], "extra", 1),
        (["model.widths=[1,2]"], "widths", [1, 2]),
        (["model.widths.1=99"], "widths", [16, 99, 64]),
        (["~model.dropout"], "dropout", None),
        (["model.dropout=${seed}", "seed=3"], "dropout", 3),
        (["+data.w=48", "model.dropout=${data.w}"], "dropout", 48),
        (["model.activation='a, b=c'"], "activation", "a, b=c"),
    ],
    ids=range(10),
)
def test_forms_of_values(overrides, key, value):
    assert composed(*overrides)["model"].get(key) == value


def test_the_users_folder_comes_first_and_our_keys_may_be_left_out(mine):
    write(mine, "optimizer/sgd.yaml", "_target_: torch.optim.SGD\nlr: 0.5\n")
    write(mine, "trainer/short.yaml", "# train trainer=short\nmax_epochs: 1\n")
    ours = ("--config-dir", str(mine))
    config = composed(*ours, "optimizer=sgd", "trainer=short")
    assert (config["optimizer"]["lr"], config["loader"]["batch_size"]) == (0.5, 128)
    assert (config["trainer"]["max_epochs"], config["trainer"]["precision"]) == (1, "fp32")
    write(mine, "experiment/marked.yaml", f"\ufeff{EXPERIMENT}name: marked\r\n")
    assert composed(*ours, "experiment=marked")["name"] == "marked"
    groups = ("transforms: basic", "/model: mlp", "/data: digits", "optimizer: adam", "task: gan")
    small = "".join(f"- {group}\n" for group in groups)
    for defaults in ("- train\n- /model/mlp@model\n", small):
        write(mine, "own.yaml", f"defaults:\n{defaults}- _self_\nname: own\n")
        assert composed(*ours, "--config-name", "own")["name"] == "own"
    for form in ("experiment=mine", "+experiment=mine", "++experiment=mine"):
        assert composed(*ours, form)["name"] == "mine"


def test_a_stored_configuration_composes_to_itself(tmp_path):
    config = composed("experiment=resnet18", "model.activation=gelu")
    stored = {**config, "run_dir": None, "resume": None, "dry_run": None}
    (tmp_path / "config.yaml").write_text(dump(stored))
    line = ["--config-dir", str(tmp_path), "--config-name", "config"]
    assert composed(*line) == stored
    # Keys whose readers are resolved are kept.
    saved = tmp_path / "config.yaml"
    saved.write_text("defaults:\n  - train\n  - _self_\nname: saved\ndata:\n  image_size: 16\n")
    assert composed(*line, "data.image_size=24")["data"]["image_size"] == 24


def test_where_a_key_was_written(mine):
    write(mine, "experiment/mine.yaml", EXPERIMENT + "loader:\n  batch_size: 3\n")
    it = compose(["--config-dir", str(mine), "experiment=mine", "seed=3"])
    keys = ("loader.batch_size", "seed", "loader.num_workers", "nothing")
    with pytest.raises(ConfigError) as caught, it.locating():
        raise ConfigError([Problem(key, "") for key in keys])
    files = [problem.file for problem in caught.value.problems]
    assert files[:2] == [f"{mine / 'experiment/mine.yaml'}:4", "command line: seed=3"]
    assert "conf/loader/default.yaml:" in (files[2] or "")
    assert files[3] is None
    # A key that others take their values from: data.train.pack is the one that is refused.
    folders = ["data.root=d", "data.tokenizer=t"]
    taken = compose(["experiment=resnet18", "data=chat", *folders, "data.pack=abc"])
    with pytest.raises(ConfigError) as caught, taken.locating():
        check_targets(parse(taken.config))
    assert {p.file for p in caught.value.problems} == {"command line: data.pack=abc"}


def test_a_choice_cannot_leave_the_folder(mine):
    for place in (mine, mine.parent):
        write(place, "secret.yaml", "_target_: regimen.models.mlp.MLP\n")
    for option in ("../secret", "../../secret", "/tmp/secret", "a/../../secret"):
        message = refused("--config-dir", str(mine), f"model={option}")
        assert "there is no model=" in message or "not an override" in message


@pytest.mark.quick
def test_a_bad_command_line_is_answered_in_one_message():
    assert refused("--config-name", "../train")
    for typed in ("a=" + "[" * 5000, "a." * 300 + "b=1"):
        assert "nested deeper" in refused(typed)
    assert "longer than" in refused("a=" + "x" * 30_000)
    assert "not an override" in refused("name=a\0b")


@pytest.mark.parametrize(
    ("typed", "key", "kept"),
    [
        ("optimizer._target_=torch.optim.SGD", "optimizer", "lr weight_decay param_groups"),
        ("task.loss._target_=torch.nn.MultiMarginLoss", "task.loss", ""),
        ("model={_target_:regimen.models.mlp.MLP,hidden:[3]}", "model", MLP),  # given with it
        (f"{TASKS}segmentation.Segmentation {CHOSEN}", "task", "loss metrics num_classes"),
        # What was chosen and is not taken: the check names it.
        (f"{TASKS}gan.GAN {CHOSEN}", "task", "loss"),
    ],
    ids=range(5),
)
def test_a_replaced_target_takes_over_what_it_takes(typed, key, kept):
    node = composed("experiment=resnet18", *typed.split())
    for name in key.split("."):
        node = node[name]
    assert node.keys() - {"_target_"} == {*kept.split()}


def test_of_very_many_mistakes_the_first_are_told(mine):
    (mine / "experiment").mkdir(exist_ok=True)
    lines = "".join(f"a{number}: 1\n" for number in range(20_000))
    (mine / "experiment/many.yaml").write_text(f"# @package _global_\n{lines}")
    with pytest.raises(ConfigError) as caught:  # all of them would take minutes
        compose(["--config-dir", str(mine), "experiment=many"])
    assert len(caught.value.problems) == MOST_PROBLEMS + 1
    assert str(caught.value.problems[0]).startswith("a0: unknown key")
    assert "further mistakes" in str(caught.value.problems[-1])


@pytest.mark.parametrize(
    "override",
    [
        pytest.param("callbacks.checkpoint.monitor", id="a metric"),
        pytest.param("model._target_", id="a target"),
        pytest.param("name", id="a folder"),
        pytest.param("model", id="a choice"),
    ],
)
def test_a_long_value_is_shortened_in_a_message(override):
    def whole_check():
        check_targets(parse(composed("experiment=resnet18", f"{override}={'n' * 5000}")))

    with pytest.raises(ConfigError) as caught:
        whole_check()
    assert len(str(caught.value)) < 3000


def test_a_replaced_target_of_a_file_drops_what_came_before(mine):
    text = "model: {_target_: regimen.models.mlp.MLP, dept: 2}\n"
    text += f"data:\n  train: {FAKE}\n  val: {FAKE}\n"
    write(mine, "experiment/mine.yaml", EXPERIMENT + text)
    line = ["--config-dir", str(mine), "experiment=mine"]
    config = composed(*line)
    shared = {"_target_", "in_channels", "num_classes", "activation"}
    assert set(config["model"]) == {*shared, "dept"}  # which the check names
    assert (config["data"]["val"]["size"], config["data"]["test"]) == (8, None)
    test = composed(*line, "data.test._target_=regimen.data.sources.Digits", "data.test.split=test")
    assert test["data"]["test"]["split"] == "test"
    alone = composed("experiment=resnet18", f"data.train={FAKE}")["data"]
    assert (alone["val"], alone["test"]) == (None, None)
    assert composed("experiment=resnet18", "data.train.image_size=8")["data"]["test"]


def test_a_caller_that_uses_hydra_itself_changes_nothing_and_keeps_its_own(mine):
    (mine / "config.yaml").write_text("mine: 1\n")
    known = hydra.__version__.startswith("1.3.")  # later versions have no other rules
    for rules in ({"version_base": "1.2"}, {"version_base": "1.3"}) if known else ({},):
        with initialize_config_dir(str(mine), **rules):
            kept = VersionBase.instance().version_base
            assert composed("--config-dir", str(mine), "experiment=mine")["name"] == "mine"
            assert hydra.compose("config") == {"mine": 1}
            assert VersionBase.instance().version_base == kept


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("seed=1 model=mlp", "model=mlp seed=1", True),
        ("optimizer.lr=1e-3", "optimizer.lr=0.001", True),
        ("+model.x=1", "model.x=1", True),
        ("seed=1", "seed=1 run_dir='a_b' resume=auto", True),
        ("seed=1", "+sweep=optuna sweep.n_trials=3 seed=1", True),
        ("seed=1", "seed=2", False),
        ("seed=1", "seed=1 model=mlp", False),
        ("seed=1 seed=2", "seed=2 seed=1", False),  # the last counts
        ("~a.b", "a.b=null", False),
        ("a=1", "a=1.0", False),
    ],
)
def test_a_job_is_its_overrides(one, other, same):
    assert (identity(one.split()) == identity(other.split())) is same
    assert identity(["model.widths=[1, 2]"]) == identity(["model.widths=[1,2]"])
    with pytest.raises(ConfigError, match="not an override"):
        identity(["=="])


def test_words_that_a_script_appends_count_and_are_recorded_so_that_they_count_again():
    typed = ["experiment=regression", "optimizer=sgd", "trainer.max_epochs=3", "seed=4"]
    appended = ["trainer.max_epochs=1", "optimizer=adamw", "experiment=resnet18"]
    argv = [*typed, *appended]

    line = compose(argv)

    assert line.config["trainer"]["max_epochs"] == 1
    assert line.choices["experiment"] == "resnet18"
    assert line.choices["optimizer"] == "adamw"
    assert line.config == composed(*appended, "seed=4")
    # What overrides.yaml holds, and the command that goes on.
    request = line.request(argv)
    assert composed(*request.overrides) == line.config
    command = shlex.split(request.resume_command(Path("run")))
    resumed = composed(*command[1:])
    assert resumed == {**line.config, "run_dir": "run", "resume": "auto"}


MLFLOW = "regimen.callbacks.trackers.mlflow.MLflow"
MIRROR = "regimen.callbacks.mirror.Mirror"
STOP = "regimen.callbacks.early_stopping.EarlyStopping"
NO_PLACES = """
checkpoint.Checkpoint.mode checkpoint.Checkpoint.monitor compression.pruning.Pruning.method
compression.pruning.Pruning.rules compression.pruning.Pruning.scope
early_stopping.EarlyStopping.mode early_stopping.EarlyStopping.monitor
tensorboard.TensorBoard.hparams trackers.mlflow.MLflow.artifacts trackers.mlflow.MLflow.experiment
trackers.recorder.Tracker.artifacts trackers.wandb.WandB.artifacts trackers.wandb.WandB.entity
trackers.wandb.WandB.mode trackers.wandb.WandB.project unfreeze.Unfreeze.stages
"""


@pytest.mark.parametrize(
    ("node", "key", "place"),
    [
        (f"_target_: {MLFLOW}, tracking_uri: /elsewhere/mlf", "tracking_uri", "/elsewhere/mlf"),
        (f"_target_: {MLFLOW}, tracking_uri: http://h", "tracking_uri", "http://h"),
        (f"_target_: {MLFLOW}, tracking_uri: mlf", "tracking_uri", "mlf"),
        (f"_target_: {MIRROR}, to: file:///elsewhere", "to", "file:///elsewhere"),
        (f"_target_: {MIRROR}, _args_: [file:///elsewhere]", "_args_.0", "file:///elsewhere"),
        (f"_target_: {STOP}, both: [{{_target_: {MIRROR}, to: s3://b}}]", "both.0.to", "s3://b"),
    ],
    ids=["a folder", "a server", "below", "a mirror", "a mirror by position", "within another"],
)
def test_where_a_run_is_written_or_sent_to_no_file_says(mine, node, key, place):
    content = EXPERIMENT + f"name: mine\ncallbacks:\n  sent: {{{node}}}\n"
    write(mine, "experiment/mine.yaml", content)
    line = ["--config-dir", str(mine), "experiment=mine"]
    told = refused(*line)
    assert f"callbacks.sent.{key}: is {place!r}" in told
    assert "experiment/mine.yaml" in told
    found = composed(*line, f"callbacks.sent.{key}={place}")["callbacks"]["sent"]
    assert place in str(found)
    # What tests a run, or asks it, goes to none of these places.
    composed_for = compose([*line], trains=False)
    assert composed_for.problems == []


def test_every_text_that_one_of_our_callbacks_takes_is_no_place_or_is_known_as_one():
    found = set()
    for path in (CONF.parent / "callbacks").rglob("*.py"):
        module = ".".join(("regimen", *path.relative_to(CONF.parent).with_suffix("").parts))
        for name, kind in inspect.getmembers(importlib.import_module(module), inspect.isclass):
            if issubclass(kind, Callback) and kind.__module__ == module:
                for parameter in inspect.signature(kind).parameters.values():
                    if "str" in str(parameter.annotation):
                        found.add(f"{module}.{name}.{parameter.name}")
    places = {f"{target}.{argument}" for target, argument in PLACES.items()}
    trial = "regimen.callbacks.trial.Trial"  # no YAML names it
    found -= {f"{trial}.storage", f"{trial}.study"}
    assert found == places | {f"regimen.callbacks.{name}" for name in NO_PLACES.split()}


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("reference::file:///x.json", "leads from one address to another"),
        ("simplecache::https://host/x", "leads from one address to another"),
        ("reference://x.json", "can hold code"),
        ("sftp://host/x", "opened where the command line says it"),
    ],
)
@pytest.mark.parametrize("key", ["root", "train.root"])
def test_an_address_of_a_file_has_one_protocol_of_a_list(mine, place, words, key, monkeypatch):
    monkeypatch.setattr(addresses, "_typed_protocols", set())
    own = f"{{root: '{place}'}}" if key == "root" else f"{{train: {{root: '{place}'}}}}"
    content = EXPERIMENT + f"defaults: [override /data: shards]\nname: mine\ndata: {own}\n"
    write(mine, "experiment/mine.yaml", content)
    line = ["--config-dir", str(mine), "experiment=mine"]
    told = refused(*line, *([] if key == "root" else ["data.root=x"]))
    assert f"data.{key}: {place!r}" in told
    assert words in told
    if place.startswith("sftp"):
        assert composed(*line, "data.root=sftp://host/x")["data"]["root"] == place
    else:
        assert words in refused(*line, f"data.root={place}")


STEP_LR = "{_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}"
CHOSEN_LAST = {
    "null, a choice": ("lr_scheduler=null", "lr_scheduler=one_cycle"),
    "deleted, a choice": ("~lr_scheduler", "lr_scheduler=one_cycle"),
    "deleted by its name, a choice": ("~lr_scheduler=constant", "lr_scheduler=one_cycle"),
    "an empty list, a choice": ("lr_scheduler=[]", "lr_scheduler=[one_cycle]"),
    "added null, a choice": ("+lr_scheduler=null", "lr_scheduler=one_cycle"),
    "null, an added choice": ("lr_scheduler=null", "+lr_scheduler=one_cycle"),
    "two choices": ("lr_scheduler=cosine", "lr_scheduler=one_cycle"),
    "a node, a choice": (f"lr_scheduler={STEP_LR}", "lr_scheduler=one_cycle"),
    "a misspelt choice, a choice": ("lr_scheduler=nothing", "lr_scheduler=one_cycle"),
    "a choice, null": ("lr_scheduler=one_cycle", "lr_scheduler=null"),
    "a choice, deleted": ("lr_scheduler=one_cycle", "~lr_scheduler"),
    "a choice, an empty list": ("lr_scheduler=one_cycle", "lr_scheduler=[]"),
    "a node, null": (f"lr_scheduler={STEP_LR}", "lr_scheduler=null"),
    "a value within, null": ("lr_scheduler.interval=epoch", "lr_scheduler=null"),
    "a choice within, null": ("lr_scheduler/warmup=linear", "lr_scheduler=null"),
}


@pytest.mark.quick
@pytest.mark.parametrize("typed", CHOSEN_LAST.values(), ids=CHOSEN_LAST.keys())
@pytest.mark.parametrize(
    "file",
    [
        pytest.param("", id="no file"),
        pytest.param("defaults: [override /lr_scheduler: null]", id="null in its list"),
        pytest.param("defaults: [override /lr_scheduler: cosine]", id="a choice in its list"),
        pytest.param("lr_scheduler: null", id="null in a file"),
        pytest.param(f"lr_scheduler: {STEP_LR}", id="a node in a file"),
    ],
)
def test_the_last_word_on_a_group_wins(mine, file, typed):
    write(mine, "experiment/mine.yaml", f"{EXPERIMENT}{file}\n")
    schedule = composed("--config-dir", str(mine), "experiment=mine", *typed)["lr_scheduler"]
    chooses = typed[-1].endswith(("one_cycle", "[one_cycle]"))
    target = "torch.optim.lr_scheduler.OneCycleLR" if chooses else None
    assert (schedule and schedule["_target_"]) == target


@pytest.mark.parametrize(
    ("typed", "there"),
    [
        pytest.param(["callbacks=null", "callbacks=[ema]"], {"ema"}, id="null, a list"),
        pytest.param(["callbacks=[ema]", "~callbacks"], set(), id="a list, deleted"),
        pytest.param(["callbacks=null", "+callbacks=ema"], {"ema"}, id="null, one more"),
        pytest.param(["callbacks=[swa]", "+callbacks=ema"], {"swa", "ema"}, id="one more"),
        pytest.param(["+callbacks=ema", "callbacks=[swa]"], {"swa"}, id="one more, a list"),
        pytest.param(["+callbacks=ema", "+callbacks=swa"], {"swa", "ema"}, id="two more"),
        pytest.param(["callbacks=none", "+callbacks=ema"], {"ema"}, id="a word, one more"),
        pytest.param(["+callbacks=ema", "+callbacks=ema"], {"ema"}, id="one twice"),
        pytest.param(["callbacks=[ema]", "callbacks.ema=null"], {"ema"}, id="a value stays"),
    ],
)
def test_the_last_word_on_a_list_of_choices_wins(typed, there):
    callbacks = composed(*typed)["callbacks"]
    assert callbacks.keys() & {"ema", "swa"} == there


OURS = "torch.optim.lr_scheduler."


@pytest.mark.parametrize(
    ("base", "choices", "target"),
    [
        pytest.param("lr_scheduler: null", ["cosine"], "CosineAnnealingLR", id="over null"),
        pytest.param(f"lr_scheduler: {STEP_LR}", ["cosine"], "CosineAnnealingLR", id="over a node"),
        pytest.param(f"lr_scheduler: {STEP_LR}", ["null"], None, id="null over a node"),
        pytest.param(
            "defaults: [override /lr_scheduler: null]", ["cosine"], "CosineAnnealingLR", id="lists"
        ),
        pytest.param("seed: 1", ["null", "cosine"], "CosineAnnealingLR", id="twice in a list"),
        pytest.param("seed: 1", ["cosine", "null"], None, id="null last in a list"),
    ],
)
def test_the_last_word_of_files_on_a_group_wins(mine, base, choices, target):
    write(mine, "experiment/base.yaml", f"{EXPERIMENT}{base}\n")
    listed = "".join(f"- override /lr_scheduler: {choice}\n" for choice in choices)
    write(mine, "experiment/mine.yaml", f"{EXPERIMENT}defaults:\n- base\n{listed}")
    schedule = composed("--config-dir", str(mine), "experiment=mine")["lr_scheduler"]
    assert (schedule and schedule["_target_"]) == (target and f"{OURS}{target}")


def test_one_more_choice_is_added_to_the_list_of_a_file(mine):
    content = EXPERIMENT + "defaults: [override /callbacks: [default, ema]]\n"
    write(mine, "experiment/mine.yaml", content)

    config = composed("--config-dir", str(mine), "experiment=mine", "+callbacks=swa")

    assert {"checkpoint", "ema", "swa"} <= config["callbacks"].keys()


def test_values_of_a_file_stay_where_another_choice_is_typed(mine):
    content = EXPERIMENT + "optimizer: {lr: 0.5}\nlr_scheduler: {interval: epoch}\n"
    write(mine, "experiment/mine.yaml", content)
    line = ["--config-dir", str(mine), "experiment=mine"]

    config = composed(*line, "lr_scheduler=cosine", "optimizer=adam")

    assert config["optimizer"]["lr"] == 0.5
    assert config["lr_scheduler"]["interval"] == "epoch"
    assert composed(*line, "lr_scheduler=null")["lr_scheduler"] is None


STOPS = "callbacks: {early_stopping: {patience: 3}}\n"
TURNS = "transforms: {train: {affine: {degrees: 10}}}\n"


@pytest.mark.parametrize(
    ("body", "typed", "section", "there"),
    [
        pytest.param(STOPS, "callbacks=none", "callbacks", set(), id="none"),
        pytest.param(STOPS, "callbacks=[progress]", "callbacks", {"progress"}, id="others"),
        pytest.param(STOPS, "callbacks=early_stopping", "callbacks", {"early_stopping"}, id="it"),
        pytest.param(TURNS, "transforms=basic", "transforms", {"to_float", "normalize"}, id="step"),
        pytest.param(TURNS, "data=diabetes", "transforms", set(), id="a step of other data"),
    ],
)
def test_a_choice_leaves_out_what_a_file_has_values_for(mine, body, typed, section, there):
    write(mine, "experiment/mine.yaml", EXPERIMENT + body)
    found = composed("--config-dir", str(mine), "experiment=mine", typed)[section]
    found = found["train"] if section == "transforms" else found
    assert found.keys() == there
    if "early_stopping" in there:
        assert found["early_stopping"]["patience"] == 3


@pytest.mark.parametrize(
    ("body", "typed", "words"),
    [
        pytest.param("", "callbacks=none callbacks.ema.decay=0.9", "+callbacks=ema", id="typed"),
        pytest.param("callbacks: {emma: {decay: 1}}", "seed=1", "did you mean ema?", id="a word"),
        pytest.param("callbacks: {emma: {decay: 1}}", "+callbacks=swa", "did you mean", id="more"),
        pytest.param("", "experment=mine", "did you mean experiment?", id="a group's name"),
        pytest.param("", "~callbacks=ema", "~callbacks.NAME", id="a choice to delete"),
        pytest.param("", "tags=[a", "a bracket is open: close it", id="an open bracket"),
        pytest.param("", "--config-name=elsewhere", "experiment=elsewhere", id="no such file"),
    ],
)
def test_a_mistake_names_the_way_out(mine, body, typed, words):
    write(mine, "experiment/mine.yaml", EXPERIMENT + body)
    assert words in refused("--config-dir", str(mine), "experiment=mine", *typed.split())


@pytest.mark.parametrize("typed", ["", "transforms=basic", "data=digits"])
def test_data_in_the_body_of_a_file_do_without_the_transforms_of_the_default(mine, typed):
    body = (
        f"data: {{train: {FAKE}}}\ntransforms: {{eval: {{own: {{_target_: torch.nn.Identity}}}}}}\n"
    )
    write(mine, "experiment/mine.yaml", EXPERIMENT + body)
    transforms = composed("--config-dir", str(mine), "experiment=mine", *typed.split())[
        "transforms"
    ]
    steps = {"transforms=basic": {"to_float", "normalize"}, "data=digits": {"affine", "to_float"}}
    assert transforms["train"].keys() >= steps.get(typed, set())
    assert bool(transforms["train"]) == bool(typed)
    assert "own" in transforms["eval"]
    # A class that is typed in place of the digits' own keeps their transforms.
    assert composed("data.train._target_=torchvision.datasets.FakeData")["transforms"]["train"]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        pytest.param(
            "experiment/mine.yaml", "data: expected a section of keys, got 3", id="a number"
        ),
        pytest.param("own.yaml", "data: missing a value", id="nothing"),
    ],
)
def test_data_that_are_no_section_are_a_mistake_of_the_configuration(mine, file, words):
    text = f"{EXPERIMENT}data: 3\n" if file.startswith("experiment") else "name: own\n"
    write(mine, file, text)
    chosen = ["experiment=mine"] if file.startswith("experiment") else ["--config-name", "own"]
    assert words in refused("--config-dir", str(mine), *chosen)
