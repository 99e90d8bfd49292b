"""What is logged, as it is recorded: `metrics.jsonl`, CSV files, and what TensorBoard reads."""

import csv
import errno
import io
import itertools
import logging
import math
import os

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from regimen.callbacks.tensorboard import TensorBoard
from regimen.callbacks.trackers.csv import CSV
from regimen.callbacks.trackers.recorder import MetricsLog
from regimen.trainer.callback import Results
from regimen.trainer.errors import StorageError
from regimen.trainer.media import PRCurve
from same_run import logged
from toys import StopAt


def recorders():
    return {
        "metrics_log": MetricsLog(),
        "csv": CSV(),
        "tensorboard": TensorBoard(),
    }


def lines(run):
    """Return step, epoch and values of each line of the log."""
    return [(row.pop("step"), row.pop("epoch"), row) for row in logged(run)]


def table(run):
    """Return step, epoch and values of each row of the CSV file."""
    found = []
    with (run / "csv" / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            values = {name: float(text) for name, text in row.items() if text}
            found.append((int(values.pop("step")), int(values.pop("epoch")), values))
    return found


def series(run):
    """Return the points of each chart of TensorBoard."""
    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    tags = board.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_names_and_texts_may_hold_lone_surrogates(make_trainer, tmp_path, caplog):
    trainer = make_trainer(recorders(), tmp_path)
    trainer.fit()
    trainer.log({"test/\ud800": 0.5})
    trainer.log({"test/\udcff": 0.25})
    trainer.log_text("shown/\ud800", "a text with \udcff and \ud800")
    trainer.end(Results("finished"))

    folder = tmp_path / "csv"
    (text,) = (folder / "shown").rglob("*.md")

    assert "continues without it" not in caplog.text
    assert {"test/\\ud800", "test/\\udcff"} <= series(tmp_path).keys()
    assert "test/\\ud800" in (folder / "metrics.csv").read_text("utf-8")
    assert text.read_text("utf-8") == "a text with \\udcff and \\ud800"


def test_all_have_each_value_once_at_its_step(make_trainer, tmp_path):
    trainer = make_trainer(recorders(), tmp_path)
    trainer.fit()
    # After the training, and its teardown.
    trainer.log({"test/loss": 1 / 3, "test/tiny": 5e-324, "test/large": 1e300 / 7})
    trainer.log({"test/loss": 0.5, "test/accuracy": 0.25})
    trainer.end(Results("finished"))

    train = {"train/accuracy", "train/grad_norm", "train/loss"}
    epoch = train | {"train/epoch_accuracy", "train/epoch_grad_norm", "train/epoch_loss"}
    val = {"val/accuracy", "val/loss"}
    found = lines(tmp_path)

    assert [(step, epochs, set(row)) for step, epochs, row in found] == [
        (2, 0, train),
        (4, 0, train),
        (5, 1, epoch),
        (5, 1, val),
        (6, 1, train),
        (8, 1, train),
        (10, 2, epoch),
        (10, 2, val),
        (10, 2, {"test/loss", "test/tiny", "test/large"}),
        (10, 2, {"test/accuracy"}),
    ]

    _, _, validated = found[-3]
    _, _, tested = found[-2]
    assert validated["val/loss"] == trainer.metrics["val/loss"]
    assert tested["test/loss"] == 1 / 3  # to the last bit
    assert table(tmp_path) == found

    board = series(tmp_path)
    assert board.pop("test/loss") == [(10, pytest.approx(1 / 3)), (10, 0.5)]

    del board["test/tiny"]  # of 32 bits
    del board["test/large"]
    for name, points in board.items():
        rows = [(step, row) for step, _, row in found if name in row]
        assert points == [(step, pytest.approx(row[name], rel=1e-6)) for step, row in rows]


def test_values_that_are_no_numbers_are_null(make_trainer, tmp_path):
    trainer = make_trainer(recorders(), tmp_path)
    trainer.fit()
    trainer.log({"test/nan": math.nan, "test/infinite": -math.inf})
    _, _, last = lines(tmp_path)[-1]

    assert last == {"test/nan": None, "test/infinite": None}


def log_what_is_lost(trainer):
    """Train on as if to step 9, of which no checkpoint tells."""
    trainer.setup()
    trainer.hooks.emit("on_fit_start")
    trainer.state.global_step = 9
    trainer.log({"train/loss": 9.0, "new": 1.0})
    trainer.log_text("words", "lost")


@pytest.mark.parametrize(("cut", "torn"), [(3, True), (5, False), (6, True)])
def test_a_resumed_run_leaves_the_records_of_one_never_interrupted(
    make_trainer, tmp_path, carry_over, events, cut, torn
):
    whole = tmp_path / "whole"
    straight = make_trainer(recorders(), whole)
    straight.fit()
    straight.end(Results("finished"))

    run = tmp_path / "cut"
    first = make_trainer({**recorders(), "stop": StopAt(cut)}, run)
    lost = make_trainer(recorders(), run)
    second = make_trainer(recorders(), run)
    first.fit()
    carry_over(first, lost)
    carry_over(first, second)  # it goes on from the first one's checkpoint again
    log_what_is_lost(lost)
    first.log({"test/loss": 9.0})  # lost as well
    if torn:
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8, "ep')
    second.fit()
    second.end(Results("finished"))

    assert lines(run) == lines(whole)
    assert table(run) == table(whole)
    assert series(run) == series(whole)
    assert list((run / "csv" / "shown").rglob("*.md")) == []

    # A TensorBoard that is open is told what to forget.
    purges = [event.step for event in events(run) if event.HasField("session_log")]
    assert purges == [cut + 1]
    for place in (run, whole):  # the layout of the charts once, however often it is resumed
        tags = [value.tag for event in events(place) for value in event.summary.value]
        assert tags.count("custom_scalars__config__") == 1


def test_no_folder_no_log(make_trainer, tmp_path):
    make_trainer(recorders()).fit()
    trainer = make_trainer(recorders())
    trainer.use_run_dir(tmp_path / "missing")
    with pytest.raises(StorageError, match=r"cannot write .*metrics\.jsonl"):
        trainer.fit()


def test_a_full_disk_is_one_warning_and_leaves_no_half_record(
    make_trainer, tmp_path, monkeypatch, caplog
):
    write = os.write
    calls = itertools.count(1)

    def full(descriptor, content):
        """Write 7 bytes in the calls 3 and 5 for TensorBoard, and nothing in the 4th."""
        file = os.readlink(f"/proc/self/fd/{descriptor}")
        if not file.endswith(".regimen"):
            return write(descriptor, content)
        call = next(calls)
        if call == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        if call in (3, 5):
            return write(descriptor, content[:7])
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        make_trainer({"tensorboard": TensorBoard()}, tmp_path).fit()

    (warning,) = messages(caplog)

    assert warning.startswith("callbacks.tensorboard: cannot write")
    assert warning.endswith("no space left on device; training continues without it")

    found = series(tmp_path)  # records 3, 4 and 5 are missing, the later ones are whole
    assert [step for step, _ in found["train/loss"]] == [2, 6, 8, 10]


@pytest.mark.parametrize(
    ("kind", "folder"),
    [
        pytest.param(CSV, "csv", id="csv"),
        pytest.param(TensorBoard, "tensorboard", id="tensorboard"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_warning(make_trainer, tmp_path, caplog, kind, folder):
    trainer = make_trainer({"mine": kind()}, tmp_path)
    place = tmp_path / folder
    place.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        trainer.fit()
        trainer.log({"test/loss": 1.0})

    (told,) = messages(caplog)

    assert told.startswith("callbacks.mine: cannot write")
    assert trainer.state.global_step == 10
    assert place.is_file()


def test_a_folder_that_is_removed_is_one_warning_and_is_not_begun_anew(
    make_trainer, tmp_path, caplog
):
    trainer = make_trainer({"mine": TensorBoard()}, tmp_path)
    place = tmp_path / "tensorboard"
    with caplog.at_level(logging.WARNING):
        trainer.fit()
        for path in place.iterdir():
            path.unlink()
        for _ in range(2):
            trainer.log({"test/loss": 1.0})

    (told,) = messages(caplog)

    assert told.startswith("callbacks.mine: cannot write")
    assert list(place.iterdir()) == []


# At 3 thresholds.
CURVE = PRCurve(
    np.array([0.0, 0.5, 1.0]),
    np.array([4.0, 3.0, 0.0]),
    np.array([6.0, 1.0, 0.0]),
    np.array([0.0, 5.0, 6.0]),
    np.array([0.0, 1.0, 4.0]),
)


@pytest.fixture
def shown(make_trainer, tmp_path):
    """Train, log a picture, a histogram, a text and a curve, and return the run's folder."""
    (tmp_path / "config.yaml").write_text("name: mine\noptimizer: {lr: 0.1}\n")
    trainer = make_trainer(recorders(), tmp_path)
    trainer.fit()
    trainer.log_image("an/image", torch.tensor([[0.0, 0.5], [1.0, 0.25]]))
    trainer.log_histogram("a/histogram", torch.arange(8.0), bins=2)
    trainer.log_text("../../words", "**bold**")
    trainer.log_pr_curve("a/curve", CURVE)
    trainer.end(Results("stopped", {"val/loss": 0.5}))
    return tmp_path


@pytest.fixture
def board(shown):
    found = EventAccumulator(str(shown / "tensorboard"))
    found.Reload()
    return found


def array_of(event):
    return tensor_util.make_ndarray(event.tensor_proto)


def test_tensorboard_has_images_and_texts(board):
    (image,) = board.Images("an/image")
    (text,) = board.Tensors("../../words/text_summary")
    file = io.BytesIO(image.encoded_image_string)
    picture = np.asarray(Image.open(file))

    assert image.step == 10
    assert picture[..., 0].tolist() == [[0, 128], [255, 64]]
    assert array_of(text).tolist() == [b"**bold**"]


def test_tensorboard_has_histograms(board):
    (event,) = board.Histograms("a/histogram")
    histogram = event.histogram_value

    assert histogram.num == 8
    assert histogram.sum == 28.0
    assert histogram.sum_squares == 140.0
    assert histogram.min == 0
    assert histogram.max == 7
    assert histogram.bucket == [4, 4]


def test_tensorboard_has_curves(board):
    (curve,) = board.Tensors("a/curve")
    rows = array_of(curve)
    true_positives, false_positives, _, _, precision, recall = rows

    assert np.allclose(true_positives, CURVE[1])
    assert np.allclose(false_positives, CURVE[2])
    assert np.allclose(precision, [0.4, 0.75, 1.0])
    assert np.allclose(recall, [1.0, 0.75, 0.0])


def test_csv_has_images_histograms_texts_and_curves_as_files(shown):
    folder = shown / "csv"
    media = folder / "shown"
    step = "step-00000010"
    picture = np.asarray(Image.open(media / f"an/image/{step}.png"))
    histogram = (media / f"a/histogram/{step}.csv").read_text()
    curve = (media / f"a/curve/{step}.csv").read_text()
    (words,) = folder.rglob("*.md")

    assert picture[..., 0].tolist() == [[0, 128], [255, 64]]
    assert histogram == "left,right,count\n0.0,3.5,4\n3.5,7.0,4\n"
    assert curve.startswith("threshold,precision,recall\n0.0,0.4,1.0\n")
    assert words.read_text() == "**bold**"


def test_csv_has_settings_and_results_as_tables(shown):
    settings = (shown / "csv/config.csv").read_text()
    results = (shown / "csv/results.csv").read_text()
    assert settings == "key,value\nname,mine\noptimizer.lr,0.1\n"
    assert results == "key,value\nstate,stopped\nval/loss,0.5\n"
