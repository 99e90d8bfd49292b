"""The plan as a person reads it."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regimen import build
from regimen.data.errors import DataError
from regimen.data.orders import Sequential
from regimen.data.samplers import UpdateSampler
from regimen.scripts.composition.compose import compose
from regimen.scripts.runs.plan import batch_split, make_plan
from regimen.trainer.components import precision
from regimen.trainer.files.layout import count, size


def test_every_decision_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["experiment=resnet18", "model=mlp", "trainer.gradient_accumulation_steps=3"]
    words += ["data.test=null", "trainer.max_epochs=2", "transforms=mixup"]
    request = compose(words)
    make_plan(request, build(request.config), Path("run"))
    text = capsys.readouterr().out
    for expected in (
        "Plan of resnet18",
        "model=mlp  ",
        "data=digits",
        "seed=0  device=cpu  strategy=single (1 device)  precision=fp32",
        "model=mlp trainer.gradient_accumulation_steps=3",
        "Digits",
        "1,257",
        "10: 0, 1, 2",
        "weight decay",
        "AdamW",
        "trainer.max_epochs=2, 20 updates an epoch, 40 in all",
        "64 = 1 device x 3 micro-batches x 21 or 22",
        "the last update of an epoch: 41 = 1 device",
        "activations of 22 samples",
        "progress: Progress",
        "a run would write to run",
        "no test split: the run ends with its validation metrics",
        "3 micro-batches: mixed samples follow the split of an update",
    ):
        assert expected in text
    assert re.search(r"updates +0 +8 +16 +24 +32 +39\ndefault( +\d\S+){6}\n", text)
    assert "\x1b[" not in text
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["plan.txt"]
    assert all(line == line.rstrip() for line in text.splitlines())


def test_emulated_formats_are_noted(tmp_path, monkeypatch, capsys):
    (tmp_path / "cpuinfo").write_text("flags : avx2\n")
    monkeypatch.setattr(precision, "_CPU_INFO", tmp_path / "cpuinfo")
    request = compose(["experiment=resnet18", "model=mlp", "trainer.precision=bf16"])
    make_plan(request, build(request.config), tmp_path / "run")
    assert "trainer.precision=bf16: this CPU emulates it" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "is_noted"), [(199, False), (200, True)])
def test_a_warm_up_that_the_run_does_not_outlast_is_noted(tmp_path, capsys, steps, is_noted):
    words = ["model=mlp", "lr_scheduler=warmup_cosine", f"lr_scheduler.warmup.steps={steps}"]
    request = compose([*words, "lr_scheduler.warmup.epochs=0", "trainer.max_epochs=20"])
    make_plan(request, build(request.config), tmp_path / "run")

    note = "lr_scheduler.warmup takes 200 updates, and the run has 200: the learning rate does"
    assert (note in capsys.readouterr().out) is is_noted


def test_data_that_cannot_be_read_end_the_plan(tmp_path, capsys):
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    words = ["experiment=resnet18", "model=mlp", "data=image_folder", f"data.root={tmp_path}"]
    request = compose([*words, "data.image_size=8"])
    with pytest.raises(DataError, match=r"broken\.jpg") as caught:
        make_plan(request, build(request.config), tmp_path / "run")
    assert getattr(caught.value, "exit_code", None) == 3
    assert "Plan of resnet18" in capsys.readouterr().out


def counts(n, devices, micro_batches):
    """Return the samples of each piece that the sampler gives."""
    size = {"batch_size": n, "gradient_accumulation_steps": micro_batches, "world_size": devices}
    samplers = (UpdateSampler(Sequential(n), **size, rank=rank) for rank in range(devices))
    return [batch_slice.count for sampler in samplers for batch_slice in sampler.batch_slices(0, 0)]


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_the_words_are_what_the_sampler_does(devices, micro_batches):
    for n in range(1, 25):
        found = counts(n, devices, micro_batches)
        largest, lines = batch_split(n, devices, micro_batches, None, drop_last=False)
        assert max(found) == largest
        sizes = " or ".join(map(str, sorted(set(found))))
        assert re.match(rf"{n} = {devices} devices? x \d micro-batch(es)? x {sizes}$", lines[0])


@pytest.mark.parametrize(
    ("words", "last"),
    [
        pytest.param(["loader.sampler.num_samples=100"], "36 = 1 device", id="fewer"),
        pytest.param(["loader.sampler.num_samples=1290"], "10 = 1 device", id="more"),
        pytest.param(["loader.sampler.num_samples=128"], None, id="whole updates"),
        pytest.param(["trainer.limit_train_batches=2"], None, id="cut off"),
    ],
)
def test_the_last_update_of_an_epoch_is_that_of_the_sampler(words, last, tmp_path, capsys):
    words = ["experiment=resnet18", "model=mlp", "+loader/sampler=balanced", *words]
    request = compose(words)
    make_plan(request, build(request.config), tmp_path)
    text = capsys.readouterr().out
    assert ("the last update of an epoch: " in text) is (last is not None)
    assert f"the last update of an epoch: {last or ''}" in text or last is None


KEYWORDS = """
import torch
from regimen.trainer.task import Task
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
    def forward(self, left, right=None):
        return self.linear(left if right is None else left + right)
class Pairs:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return {"left": torch.ones(4), "right": torch.zeros(4), "label": index % 2}
class Named(Task):
    def training_step(self, model, batch):
        output = model(batch["left"], batch["right"])
        return torch.nn.functional.cross_entropy(output, batch["label"])
class Positions(Named):
    def prediction_step(self, model, batch):
        return model(batch)
"""


def test_the_plan_says_that_predict_could_not_ask_the_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_pairs.py").write_text(KEYWORDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["model={_target_: my_pairs.Net}", "transforms=none", "data.num_classes=2"]
    words += [f"data.{split}={{_target_: my_pairs.Pairs}}" for split in ("train", "val")]
    words += ["data.test=null", "experiment=resnet18"]
    for task, said in (("Named", False), ("Positions", True)):
        request = compose([*words, f"task={{_target_: my_pairs.{task}}}"])
        make_plan(request, build(request.config), tmp_path)
        assert ("give the task a method prediction_step" in capsys.readouterr().out) is said


def test_an_update_of_several_batches_is_described_by_batch(tmp_path, capsys):
    """1257 samples are 20 batches of 64, of which the last has 41."""
    words = ["experiment=gan", "task.fresh_batches=true", "loader.batch_size=64"]
    request = compose([*words, "loader.drop_last=false"])
    make_plan(request, build(request.config), tmp_path)
    text = capsys.readouterr().out
    assert "2 batches an update, one for each turn: discriminator, generator\n64 = 1 dev" in text
    assert "the last batch of an epoch: 41 = 1 device" in text
    assert "the last update" not in text


def test_an_epochs_last_samples():
    for samples in (None, 40):  # a stream, and one that the batches divide
        assert len(batch_split(10, 1, 1, samples, drop_last=False)[1]) == 1
    for drop_last, words in ((False, "update of an epoch: 3 = "), (True, "3 samples of each ep")):
        _, (first, second) = batch_split(10, 1, 1, 43, drop_last)
        assert (first[:5], second[: len(words) + 9]) == ("10 = ", f"the last {words}")


def test_figures_are_short():
    figures = {0: "0", 999: "999", 1000: "1 k", 11_172_810: "11.2 M", 2.77e8: "277 M", None: "?"}
    assert {value: count(value) for value in figures} == figures
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 44_691_240: "42.6 MiB", None: "?"}
    assert {value: size(value) for value in sizes} == sizes
    assert size(5 * 2**40) == "5.0 TiB"


def test_files_of_which_little_is_left_are_counted_and_data_have_fingerprints(tmp_path, capsys):
    for split, files in (("train", 6), ("val", 2)):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(files):
                values = np.full((9, 9), 4095 - number, np.uint16)
                Image.fromarray(values).save(tmp_path / split / name / f"{number}.png")
    words = ["experiment=resnet18", "model=mlp", "data=image_folder", f"data.root={tmp_path}"]
    words += ["data.image_size=8", "data.channels=1", "data.mean=[0.5]", "data.std=[0.5]"]
    for more in ([], ["data.range=[0,4095]"]):
        request = compose([*words, *more])
        experiment = build(request.config)
        make_plan(request, experiment, tmp_path / "run")
        text = " ".join(capsys.readouterr().out.split())
        proposed = "16 levels of them are left, and with data.range=[0,4095] 256"
        assert "data.train: 12 files of 12 hold 16-bit greys" in text
        assert "data.val: 4 files of 4 hold 16-bit greys" in text
        assert (proposed in text) == (not more)
        for facts in experiment.data.describe():
            assert facts["fingerprint"] in text
