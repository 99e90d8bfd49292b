"""experiment=detection: trains from a folder in either layout, on any split of an update."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from regimen import load_run
from regimen.models.retinanet import retinanet
from same_run import logged
from toy_boxes import CLASSES, scene, write_coco, write_yolo

SMALL = [
    "experiment=detection",
    "data.image_size=64",
    "trainer.log_every_n_steps=1",
    "loader.batch_size=8",
    "model.channels=16",
]
SPLITS = {"train": (0, 32), "val": (1000, 10), "test": (2000, 10)}


TWO_PROCESSES = ["strategy=ddp", "strategy.devices=2"]


def scenes_of(first, count):
    return [scene(first + number) for number in range(count)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same scenes in COCO's and in YOLO's layout."""
    pytest.importorskip("torchmetrics")
    pytest.importorskip("faster_coco_eval")
    tree = tmp_path_factory.mktemp("boxes")
    yolo = tree / "yolo"
    yolo.mkdir()
    (yolo / "data.yaml").write_text(f"names: {json.dumps(CLASSES)}\n")
    for split, (first, count) in SPLITS.items():
        scenes = scenes_of(first, count)
        coco = tree / "coco" / split
        write_coco(coco, coco / "_annotations.json", scenes)
        write_yolo(yolo / split / "images", yolo / split / "labels", scenes)
    return tree


def logged_values(run, name):
    """Return all values of a metric that a run logged, in order."""
    return [line[name] for line in logged(run) if name in line]


def last_logged(run):
    """Return the last value of each metric that a run logged."""
    last = {}
    for line in logged(run):
        last |= line
    return last


def read_json(path):
    return json.loads(path.read_text())


def test_both_layouts_and_any_split_of_an_update_are_one_training(train, folders, tmp_path):
    words = [*SMALL, "trainer.max_steps=3", "task.per_class=true", "trainer.precision=fp64"]
    coco = [f"data.root={folders / 'coco'}", "trainer.gradient_accumulation_steps=1"]
    yolo = [f"data.root={folders / 'yolo'}", "trainer.gradient_accumulation_steps=4"]

    train([*words, *coco, f"run_dir={tmp_path / 'coco'}"])
    train([*words, *yolo, f"run_dir={tmp_path / 'yolo'}"])

    names = last_logged(tmp_path / "coco").keys()
    assert {"val/map_50_95", "val/map_50", "test/map_75", "val/map_zero"} <= names
    assert {"train/loss_classification", "train/loss_bbox_regression"} <= names
    losses = logged_values(tmp_path / "coco", "train/loss")
    assert len(losses) == 3
    others = logged_values(tmp_path / "yolo", "train/loss")
    assert losses == pytest.approx(others, rel=1e-6)


@pytest.mark.slow
def test_two_processes_and_evaluate_give_the_same_map(train, folders, tmp_path):
    words = [*SMALL, f"data.root={folders / 'coco'}", "trainer.max_steps=4", "model.score_thresh=0"]
    words += ["trainer.precision=fp64"]
    one = tmp_path / "one"
    two = tmp_path / "two"

    train([*words, f"run_dir={one}"])
    train([*words, *TWO_PROCESSES, f"run_dir={two}"])
    train([f"run={two}", "loader.eval_batch_size=3"], command="evaluate")

    expected = logged_maps(one)
    assert {"val/map_50_95", "test/map_50", "test/map_75"} <= expected.keys()
    assert expected["val/map_50"] > 0
    assert expected == pytest.approx(logged_maps(two), rel=1e-6)
    evaluated = read_json(two / "evaluation.json")
    for name, value in expected.items():
        if name.startswith("test/"):
            assert evaluated[name] == pytest.approx(value, rel=1e-6)


def logged_maps(run):
    """Return the last mean average precisions of validation and test."""
    last = last_logged(run)
    return {name: last[name] for name in last if name.startswith(("val/map", "test/map"))}


def test_a_wrong_annotation_ends_the_run_with_code_3(train, folders, tmp_path):
    content = read_json(folders / "coco/train/_annotations.json")
    content["annotations"][6]["bbox"] = [0, 0, 900, 10]
    file = tmp_path / "train" / "_annotations.json"
    write_coco(file.parent, file, scenes_of(0, 32))
    file.write_text(json.dumps(content))

    ended = train([*SMALL, f"data.root={tmp_path}", f"run_dir={tmp_path / 'run'}"], code=3)

    assert f"{file}: annotation 7: the box" in ended.err


@pytest.mark.slow
def test_a_short_training_finds_digits(start, tmp_path):
    pytest.importorskip("faster_coco_eval")
    write_coco(tmp_path / "train", tmp_path / "train" / "a.json", scenes_of(0, 96))
    write_coco(tmp_path / "val", tmp_path / "val" / "a.json", scenes_of(1000, 24))
    run = tmp_path / "run"
    words = [
        "experiment=detection",
        "transforms=none",
        "data.image_size=64",
        "loader.batch_size=8",
        "trainer.max_epochs=10",
        "trainer.validate_every_n_epochs=5",
    ]

    start([*words, f"data.root={tmp_path}", f"run_dir={run}"]).wait(0, 600)

    losses = logged_values(run, "train/epoch_loss")
    assert losses[-1] < 0.5 * losses[0]
    precisions = logged_values(run, "val/map_50")
    assert precisions[-1] > max(precisions[0], 0.2)


@pytest.fixture(scope="module")
def trained(train, folders, tmp_path_factory):
    """A run of some updates, which finds many boxes, but none in a black picture."""
    path = tmp_path_factory.mktemp("trained") / "run"
    words = [
        *SMALL,
        f"data.root={folders / 'coco'}",
        "loader.num_workers=0",
        "trainer.max_steps=40",
        "trainer.log_every_n_steps=20",
        "trainer.validate_every_n_epochs=10",
        "transforms=none",
        "model.score_thresh=0.1",
        "callbacks=[default,boxes]",
    ]
    train([*words, f"run_dir={path}"])
    return path


def by_hand(run, picture):
    """Return boxes as x, y, width, height, scores and labels, by nothing of ours but the network.

    The picture is brought to 64 pixels a side.
    """
    checkpoint = torch.load(run / "checkpoints/best.pt", weights_only=True)
    mean = [0.485, 0.456, 0.406]
    std = [0.229, 0.224, 0.225]
    model = retinanet(3, 64, score_thresh=0.1, mean=mean, std=std, channels=16)
    model.eval()
    model.load_state_dict(checkpoint["model"])

    pixels = np.array(Image.open(picture).convert("RGB"))
    pixels = torch.from_numpy(pixels).movedim(-1, 0)
    height, width = pixels.shape[1:]
    longer = max(height, width)
    rows = round(height * 64 / longer)
    columns = round(width * 64 / longer)
    image = torch.zeros(3, 64, 64)
    image[:, :rows, :columns] = F.resize(pixels, [rows, columns]) / 255
    with torch.no_grad():
        (answer,) = model(image[None])

    # Back into pixels of the picture, as corners; then to width and height.
    scale = torch.tensor([width / columns, height / rows] * 2)
    boxes = answer["boxes"] * scale
    boxes = boxes.clamp(torch.zeros(4), torch.tensor([width, height] * 2))
    boxes[:, 2:] -= boxes[:, :2]
    return boxes, answer["scores"], answer["labels"]


@pytest.fixture
def photographs(tmp_path):
    """Pictures of other sizes than those that were trained on, one of them black."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    for number, size in enumerate([(96, 130), (60, 33), (64, 64)]):
        pixels, *_ = scene(number, size)
        Image.fromarray(pixels).save(folder / f"a {number}.png")
    Image.new("L", (50, 40)).save(folder / "black.jpg")
    return folder


def test_predictions_are_those_of_plain_torch_in_pixels_of_the_picture(
    train, trained, photographs, tmp_path
):
    words = [f"run={trained}", f"source={photographs}", f"out={tmp_path / 'boxes.json'}"]

    train([*words, "loader.num_workers=0"], command="predict")

    found = read_json(tmp_path / "boxes.json")
    files = sorted(photographs.iterdir())
    assert {entry["file_name"] for entry in found} <= {str(file) for file in files}
    assert len(found) > 10
    for index, file in enumerate(files):
        boxes, scores, labels = by_hand(trained, file)
        entries = [entry for entry in found if entry["image_id"] == index]
        categories = [10 * (label + 1) for label in labels]
        assert len(entries) == len(boxes)
        assert [entry["category_id"] for entry in entries] == categories
        for entry, box, score in zip(entries, boxes.tolist(), scores.tolist(), strict=True):
            assert entry["file_name"] == str(file)
            assert entry["bbox"] == pytest.approx(box, abs=1e-3)
            assert entry["score"] == pytest.approx(score, abs=1e-5)


def test_predict_draws_a_picture_of_each_file(train, trained, photographs, tmp_path):
    words = [f"run={trained}", f"source={photographs}", f"out={tmp_path / 'boxes.json'}"]

    train([*words, f"draw={tmp_path / 'drawn'}", "loader.num_workers=0"], command="predict")

    drawn = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert drawn == ["000000_a_0.png", "000001_a_1.png", "000002_a_2.png", "000003_black.png"]
    assert len(list(photographs.iterdir())) == 4


def test_predictions_from_python_are_those_of_plain_torch(trained, photographs):
    file = sorted(photographs.iterdir())[2]

    (row,) = load_run(trained, "cpu").predict([file])

    boxes, _, labels = by_hand(trained, file)
    assert row["prediction"] == [CLASSES[label] for label in labels]
    np.testing.assert_allclose(row["bbox"], boxes, atol=1e-3)


@pytest.mark.slow
def test_a_table_is_the_same_from_two_processes(train, trained, photographs, tmp_path):
    words = [f"run={trained}", f"source={photographs}"]
    train([*words, f"out={tmp_path / 'all.json'}"], command="predict")
    every_score = [entry["score"] for entry in read_json(tmp_path / "all.json")]
    threshold = float(np.median(every_score))
    words.append(f"score_threshold={threshold}")

    train([*words, f"out={tmp_path / 'one.csv'}"], command="predict")
    train([*words, *TWO_PROCESSES, f"out={tmp_path / 'two.csv'}"], command="predict")

    assert (tmp_path / "one.csv").read_text() == (tmp_path / "two.csv").read_text()
    with open(tmp_path / "one.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with_box = [row for row in rows if row["prediction"]]
    kept_scores = [score for score in every_score if score >= threshold]
    assert len(with_box) == len(kept_scores) < len(every_score)
    # A picture without a box has a row, too.
    assert {row["file"] for row in rows} == {str(file) for file in photographs.iterdir()}


def test_results_of_a_split_are_those_that_coco_evaluates(train, trained, folders, tmp_path):
    from faster_coco_eval import COCO, COCOeval_faster

    out = tmp_path / "boxes.json"
    words = [f"run={trained}", "source=test", f"out={out}", f"draw={tmp_path / 'drawn'}"]

    train([*words, "loader.num_workers=0"], command="predict")

    truth = COCO(str(folders / "coco/test/_annotations.json"))
    answers = truth.loadRes(str(out))
    evaluation = COCOeval_faster(truth, answers, iouType="bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    last = last_logged(trained)
    assert last["test/map_50"] > 0
    assert evaluation.stats[0] == pytest.approx(last["test/map_50_95"], abs=2e-3)
    assert evaluation.stats[1] == pytest.approx(last["test/map_50"], abs=2e-3)
    # Truth and answer side by side: two pictures of 64 x 48, enlarged by 4, and a gap.
    with Image.open(tmp_path / "drawn/000000_000.png") as drawn:
        assert drawn.size == (2 * 256 + 8, 192)


def contents(folder):
    return {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["draw={folder}"], "draw: {folder} is not empty", id="not empty"),
        pytest.param(
            ["draw={folder}", "overwrite=true"], "draw: {folder} holds pictures", id="its own"
        ),
        pytest.param(["save=logits"], "save: logits: a detector answers", id="save"),
        pytest.param(["top_k=3"], "top_k: a box has one class", id="top_k"),
        pytest.param(["score_threshold=2"], "score_threshold: expected a number", id="threshold"),
    ],
)
def test_keys_that_do_not_fit_boxes_are_refused(
    train, trained, photographs, tmp_path, words, message
):
    before = contents(photographs)
    words = [word.format(folder=photographs) for word in words]
    words += [f"run={trained}", f"source={photographs}", f"out={tmp_path / 'b.csv'}"]

    error = train(words, 2, command="predict").error

    assert error.startswith(message.format(folder=photographs))
    assert contents(photographs) == before


@pytest.fixture(scope="module")
def exported(train, trained, tmp_path_factory):
    """The trained run as ONNX."""
    pytest.importorskip("onnxruntime")
    out = tmp_path_factory.mktemp("exported") / "onnx"
    train([f"run={trained}", "format=onnx", f"out={out}"], command="export")
    return out


def test_a_file_says_what_it_takes_and_answers(exported):
    import onnxruntime

    facts = read_json(exported / "export.json")

    assert facts["input"]["shape"] == [1, 3, 64, 64]
    assert facts["verified"]["largest_difference"] <= 1e-4
    assert {"boxes", "scores", "labels"} <= facts["outputs"].keys()
    session = onnxruntime.InferenceSession(str(exported / "model.onnx"))
    outputs = [value.name for value in session.get_outputs()]
    assert outputs == ["boxes", "scores", "labels"]


def test_a_file_has_the_boxes_of_the_model(trained, exported):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(exported / "model.onnx"))
    model = load_run(trained).model()
    pictures = [torch.zeros(3, 64, 64), torch.ones(3, 64, 64)]
    for number in range(4):
        pixels, *_ = scene(number)
        square = np.pad(pixels, ((0, 16), (0, 0), (0, 0)))
        pictures.append(torch.from_numpy(square).movedim(-1, 0) / 255)

    counts = set()
    for picture in pictures:
        answer = session.run(None, {"input": picture[None].numpy()})
        boxes, scores, labels = answer
        with torch.no_grad():
            (expected,) = model(picture[None])
        counts.add(len(boxes))
        assert len(boxes) == len(expected["boxes"])
        np.testing.assert_allclose(scores, expected["scores"], atol=1e-5)
        # Boxes of nearly equal scores may change places: each has a near one of its class.
        for label in range(3):
            in_model = expected["labels"] == label
            in_file = labels == label
            of_model = expected["boxes"][in_model]
            of_file = torch.from_numpy(boxes[in_file])
            assert len(of_file) == len(of_model)
            if len(of_model):
                distances = torch.cdist(of_model.double(), of_file.double(), p=float("inf"))
                nearest = distances.amin(1)
                assert nearest.max() < 64 * 1e-4
    assert len(counts) > 1


def test_a_file_is_evaluated_as_the_run_was(train, trained, exported):
    artefact = exported / "model.onnx"

    train([f"run={trained}", f"artefact={artefact}"], command="evaluate")

    evaluated = read_json(trained / "evaluation.json")
    expected = last_logged(trained)["test/map_50"]
    assert evaluated["test/map_50"] == pytest.approx(expected, abs=1e-6)


def test_a_format_that_holds_no_lists_is_refused(train, trained):
    error = train([f"run={trained}", "format=torch_export"], 2, command="export").error
    assert error.startswith("format=torch_export does not take a detector")
    assert not (trained / "exports").exists()
