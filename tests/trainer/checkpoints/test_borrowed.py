"""Frozen weights that are read from files: what a checkpoint leaves out, and when it does not."""

import hashlib
import logging
import subprocess
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import toys
from regimen import load_run
from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.ema import EMA
from regimen.callbacks.swa import SWA
from regimen.callbacks.unfreeze import Unfreeze
from regimen.conf.errors import ConfigError
from regimen.models.pretrained import fine_tune
from regimen.models.timm_adapter import build as timm_model
from regimen.scripts.convert import convert
from regimen.trainer.callback import Callback
from regimen.trainer.checkpoints.borrowed import KEY, mark_as_read, sources_of
from regimen.trainer.checkpoints.reader import check_payload, model_only, read_checkpoint
from regimen.trainer.errors import CheckpointError
from regimen.trainer.strategies.ddp import DDP
from regimen.trainer.strategies.fsdp import FSDP
from regimen.trainer.tasks.classification import Classification
from toys import StopAt, differences, in_group, points, through_a_file, trainer_of

BASE = {"0.weight", "0.bias"}
LAST = "checkpoints/last.pt"


class Freeze(Callback):
    """Freeze or thaw the first layer at a step."""

    freezes = True

    def __init__(self, freeze=None, thaw=None):
        self.freeze = freeze
        self.thaw = thaw

    def on_update_end(self, trainer):
        layer = trainer.model[0]
        if trainer.state.global_step == self.freeze:
            layer.requires_grad_(False)
        if trainer.state.global_step == self.thaw:
            layer.requires_grad_(True)


@pytest.fixture
def file(tmp_path):
    """The weights of the first layer in a file."""
    torch.manual_seed(5)
    layer = nn.Linear(5, 7).double()
    path = tmp_path / "base" / "base.safetensors"
    path.parent.mkdir()
    weights = {f"0.{name}": value.detach() for name, value in layer.named_parameters()}
    save_file(weights, path)
    return path


def network(file, frozen=True):
    torch.manual_seed(3)
    layers = [nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)]
    model = fine_tune(nn.Sequential(*layers).double(), str(file), strict=False)
    model[0].requires_grad_(not frozen)
    return model


def make(file, callbacks=(), frozen=True, strategy=None, stop=None, borrow=True, **options):
    """A trainer whose callbacks are named, with a checkpoint after each second update."""
    named = {**dict(callbacks), "stop": StopAt(stop)}
    if borrow != "none":
        named["checkpoint"] = Checkpoint(
            monitor=None, every_n_steps=2, every_n_epochs=None, borrow=borrow
        )
    options = {"max_epochs": 2, "log_every_n_steps": 1, **options}
    return trainer_of(
        Classification(3),
        points(),
        model=network(file, frozen),
        strategy=strategy,
        callbacks=named,
        **options,
    )


def saved(trainer):
    return through_a_file(trainer.state_dict())


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def borrowed_by(trainer):
    """Return the names of the parameters that a checkpoint leaves out."""
    every = trainer.model.state_dict().keys()
    return every - saved(trainer)["model"].keys()


def test_a_checkpoint_has_the_hash_in_place_of_what_stays(file):
    trainer = make(file)
    trainer.fit()
    state = saved(trainer)
    (entry,) = state[KEY]

    assert entry["folder"] == str(file.parent)
    assert entry["sha256"] == sha256(file)
    assert set(entry["parameters"]) == BASE
    # Buffers stay: BatchNorm's change in every update.
    assert state["model"].keys() == trainer.model.state_dict().keys() - BASE


@pytest.mark.parametrize("borrow", [False, None, "none"])
def test_it_holds_all_unless_it_is_told_to_borrow(file, borrow):
    trainer = make(file, borrow=borrow)
    trainer.fit()
    state = saved(trainer)

    assert KEY not in state
    assert state["model"].keys() == trainer.model.state_dict().keys()


def unfreeze(**more):
    return Unfreeze({"a": {"pattern": "0.*", **more}})


@pytest.mark.parametrize(
    ("callback", "frozen", "at_last"),
    [
        pytest.param(Freeze(thaw=3), True, set(), id="thawed"),
        pytest.param(Freeze(thaw=3, freeze=5), True, set(), id="frozen again, with other values"),
        pytest.param(unfreeze(step=3), False, set(), id="by Unfreeze"),
        pytest.param(unfreeze(), False, BASE, id="never"),
    ],
)
def test_what_is_trained_is_saved_from_then_on(file, callback, frozen, at_last):
    trainer = make(file, {"mine": callback}, frozen=frozen, stop=2)
    trainer.fit()
    assert borrowed_by(trainer) == BASE

    trainer.callbacks["stop"].update = None
    trainer.fit()
    assert borrowed_by(trainer) == at_last


def test_what_was_trained_before_it_is_frozen_is_saved(file):
    trainer = make(file, {"freeze": Freeze(freeze=2)}, frozen=False)
    trainer.fit()
    assert KEY not in saved(trainer)


@pytest.mark.parametrize(
    "average",
    [
        pytest.param(None, id="none"),
        pytest.param(lambda: EMA(decay=0.8), id="ema"),
        pytest.param(lambda: SWA(start_epoch=0), id="swa"),
        pytest.param(lambda: EMA(decay=0.8, use_for_evaluation=False), id="not evaluated"),
    ],
)
def test_a_resume_is_that_of_whole_checkpoints(file, average):
    """Bit for bit, in the middle of an epoch; the average of what stays is not repeated."""

    def callbacks():
        return {} if average is None else {"average": average()}

    whole = make(file, callbacks(), borrow=False)
    whole.fit()
    begun = make(file, callbacks(), stop=4)
    begun.fit()
    state = saved(begun)

    for weights in (state["ema"], state["callbacks"].get("average", {})):
        assert not BASE & weights.get("model", {}).keys()

    resumed = make(file, callbacks())
    resumed.load_state_dict(state)
    resumed.fit()
    resumed.callbacks["checkpoint"].borrow = False
    found = differences(saved(whole), saved(resumed))
    unexpected = [name for name in found if "checkpoint" not in name and "made_with" not in name]

    assert unexpected == []


def test_a_file_that_changes_in_the_meantime_is_no_longer_borrowed(file, caplog):
    trainer = make(file, stop=2)
    trainer.fit()
    assert KEY in saved(trainer)

    before = trainer.model[0].weight.clone()
    content = file.read_bytes()
    file.write_bytes(content[:-8] + b"otherway")
    state = saved(trainer)

    assert KEY not in state
    assert torch.equal(state["model"]["0.weight"], before)
    assert "checkpoints hold all" in caplog.text

    # Nor when it is as it was: the whole checkpoint is the one that a run goes on from.
    other = make(file)
    other.load_state_dict(state)
    other.fit()

    assert KEY not in saved(other)


def test_another_file_is_refused_with_both_hashes(file):
    trainer = make(file)
    trainer.fit()
    state = saved(trainer)
    expected = sha256(file)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    other = make(file)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}

    with pytest.raises(CheckpointError, match=r"model\.weights=FILE") as caught:
        other.load_state_dict(state)
    assert expected in str(caught.value)
    assert sha256(file) in str(caught.value)
    for name, value in other.model.state_dict().items():
        assert torch.equal(before[name], value)


def test_a_model_that_was_not_built_from_a_file_has_no_weights_to_lend(file):
    trainer = make(file)
    trainer.fit()
    state = saved(trainer)
    layers = network(file)
    plain = trainer_of(Classification(3), points(), model=nn.Sequential(*layers))

    with pytest.raises(CheckpointError, match="built without reading weights"):
        plain.load_state_dict(state)


def test_a_copy_elsewhere_is_taken(file, tmp_path):
    trainer = make(file)
    trainer.fit()
    state = saved(trainer)
    moved = tmp_path / "moved.safetensors"
    file.rename(moved)

    other = make(moved)
    other.load_state_dict(state)

    toys.assert_equal(other.model, trainer.model, 0)

    (entry,) = saved(other)[KEY]
    assert entry["folder"] == str(tmp_path)


def test_the_hash_of_several_files_is_that_of_sha256sum(tmp_path):
    paths = [tmp_path / "model-00002.safetensors", tmp_path / "model-00001.safetensors"]
    for path in paths:
        path.write_text(path.name)
    module = nn.Linear(2, 2)
    mark_as_read(module, {"weight"}, paths, "model.name", "x")
    mark_as_read(module, {"bias"}, [tmp_path / "nowhere"], "model.name", "x")  # nothing to lend
    (source,) = sources_of({"": module})

    command = "sha256sum model-*.safetensors | sha256sum"
    done = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    expected, _ = done.stdout.split()

    assert source.sha256() == expected


def test_files_are_hashed_once(file, monkeypatch):
    trainer = make(file)
    trainer.fit()
    state = saved(trainer)
    monkeypatch.setattr("regimen.trainer.checkpoints.borrowed.digest", None)
    saved(trainer)
    other = make(file)
    other.load_state_dict(state)  # size and time are those of the checkpoint

    assert saved(other)[KEY] == state[KEY]


def test_the_weights_that_were_read_last_count(file, tmp_path):
    model = network(file)
    second = tmp_path / "second.safetensors"
    save_file({"0.weight": torch.ones(7, 5).double()}, second)
    fine_tune(model, str(second), strict=False)
    names = {source.files[0].name: names for source, names in sources_of({"a.": model}).items()}

    assert names == {"second.safetensors": {"a.0.weight"}, "base.safetensors": {"a.0.bias"}}


class Taught(Classification):
    """Learn from a frozen teacher, too."""

    def __init__(self, teacher):
        super().__init__(3)
        self.teacher = teacher

    def training_step(self, model, batch):
        self.teacher(batch[0])
        return super().training_step(model, batch)


def test_a_frozen_teacher_of_the_task_is_borrowed(file):
    def taught():
        teacher = network(file).requires_grad_(False).eval()
        callbacks = {"checkpoint": Checkpoint(monitor=None, borrow=True)}
        return trainer_of(Taught(teacher), points(), callbacks=callbacks)

    trainer = taught()
    trainer.fit()
    state = saved(trainer)
    (entry,) = state[KEY]
    borrowed = set(entry["parameters"])
    kept = state["state"]["unsaved"][0]["task"].keys()

    assert borrowed == {f"task.teacher.{name}" for name in BASE}
    assert "task.teacher.3.weight" in kept
    assert not borrowed & kept

    other = taught()
    other.load_state_dict(state)
    toys.assert_equal(other.task.teacher, trainer.task.teacher, 0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda entry: "x", id="a text"),
        pytest.param(lambda entry: ["x"], id="a list of texts"),
        pytest.param(lambda entry: [{"folder": "x"}], id="a folder alone"),
        pytest.param(lambda entry: [{**entry, "parameters": [1]}], id="a number as parameter"),
    ],
)
def test_a_stranger_s_entries_are_checked(file, change):
    trainer = make(file)
    trainer.fit()
    state = saved(trainer)
    (entry,) = state[KEY]
    state[KEY] = change(entry)

    with pytest.raises(CheckpointError, match="borrowed"):
        check_payload(state, None)


def test_weights_alone_are_not_in_it(file, tmp_path):
    run = tmp_path / "run"
    trainer = make(file, run_dir=run)
    trainer.fit()

    with pytest.raises(CheckpointError, match=r"convert --whole"):
        model_only(run)
    with pytest.raises(ConfigError, match="Python, whose files describe no model"):
        convert(["--whole", str(run / LAST), str(tmp_path / "whole.pt")])


def test_of_a_model_of_timm_the_weights_of_a_file_are_borrowed(tmp_path):
    timm = pytest.importorskip("timm")
    file = tmp_path / "trained.safetensors"
    torch.manual_seed(7)
    save_file(timm.create_model("resnet10t", num_classes=5).state_dict(), file)
    overlay = {"file": str(file), "num_classes": 5}

    def built(**more):
        return timm_model("resnet10t", 3, 1, pretrained_cfg_overlay=overlay, **more)

    model = built(pretrained=True)
    ((source, names),) = sources_of({"": model}).items()
    assert (source.key, source.files) == ("model.pretrained_cfg_overlay.file", [file])
    # The channels and the classes are others: timm adapts one layer, and begins the other anew.
    every = dict(model.named_parameters())
    assert names == every.keys() - {"conv1.0.weight", "fc.weight", "fc.bias"}
    again = dict(built(pretrained=True).named_parameters())
    assert all(torch.equal(again[name], every[name]) for name in names)
    assert sources_of({"": built(pretrained=False)}) == {}


@pytest.mark.parametrize("word", ["model.name", "model.name=", "trainer.max_epochs=3"])
def test_a_conversion_takes_places_of_weights_alone(tmp_path, word):
    with pytest.raises(ConfigError, match=f"'{word}' does not say where weights are"):
        convert(["--whole", str(tmp_path / "last.pt"), str(tmp_path / "whole.pt"), word])


def test_a_run_from_python_is_opened_with_a_model_that_has_read_them(file, tmp_path):
    path = tmp_path / "run"
    ema = EMA(decay=0.8)
    trainer = make(file, {"ema": ema}, run_dir=path)
    trainer.fit()
    expected = ema.tensors()

    run = load_run(path, "cpu", model=network(file))
    model = run.model("last")

    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])

    without_a_file = nn.Sequential(*network(file))
    run = load_run(path, "cpu", model=without_a_file)
    with pytest.raises(CheckpointError, match="built without reading weights"):
        run.model("last")

    best = trainer.load_best()
    assert best.step == trainer.state.global_step


def in_two(strategy, file, folder, stop=None, resume=None):
    """Train on a process's part, and return the weights of all and what a checkpoint has."""
    trainer = make_sharded(strategy, file, folder, stop)
    if resume is not None:
        trainer.load_state_dict(read_checkpoint(resume))
    trainer.fit()
    whole = strategy.gather_tensors(dict(trainer.model.state_dict()))
    whole = strategy.group.broadcast(whole)  # it is so on the main process
    return {name: value.clone() for name, value in whole.items()}


def make_sharded(strategy, file, folder, stop):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    fine_tune(model, str(file), strict=False)
    model[0].requires_grad_(False)
    folder.mkdir(exist_ok=True)
    trainer = trainer_of(
        Classification(3),
        points(),
        model=model,
        make=partial(torch.optim.AdamW, lr=0.05),
        strategy=strategy,
        callbacks={
            "ema": EMA(decay=0.8),
            "stop": StopAt(stop),
            "checkpoint": Checkpoint(monitor=None, borrow=True),
        },
        max_epochs=2,
    )
    trainer.use_run_dir(folder)
    return trainer


@pytest.mark.parametrize(
    ("kind", "options"), [(DDP, {}), (FSDP, {}), (FSDP, {"sharded_checkpoint": True})]
)
def test_two_processes_borrow_as_one_does(ranks, file, tmp_path, kind, options):
    logging.disable(logging.NOTSET)
    folder = tmp_path / "run"
    begin = partial(in_two, file=file, folder=folder, stop=4)
    ranks(2, in_group(begin, kind=kind, **options))
    payload = read_checkpoint(folder / LAST)
    (entry,) = payload[KEY]

    assert set(entry["parameters"]) == BASE
    assert payload["model"].keys() == {"2.weight", "2.bias"}
    assert payload["ema"]["model"].keys() == {"2.weight", "2.bias"}

    end = partial(in_two, file=file, folder=tmp_path / "resumed", resume=folder / LAST)
    first, second = ranks(2, in_group(end, kind=kind, **options))
    model = make_sharded(None, file, tmp_path / "x", None).model
    optimizer = partial(torch.optim.AdamW, lr=0.05)
    alone = trainer_of(Classification(3), points(), model=model, make=optimizer)
    alone.fit()

    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-12)
        torch.testing.assert_close(second[name], value, rtol=0, atol=1e-12)
