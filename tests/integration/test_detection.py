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
    *("experiment=detection", "data.image_size=64", "trainer.log_every_n_steps=1"),
    *("loader.batch_size=8", "model.channels=16"),
]
SPLITS = {"train": (0, 32), "val": (1000, 10), "test": (2000, 10)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same scenes in COCO's and in YOLO's layout."""
    pytest.importorskip("torchmetrics")
    pytest.importorskip("faster_coco_eval")
    tree = tmp_path_factory.mktemp("boxes")
    (tree / "yolo").mkdir()
    (tree / "yolo/data.yaml").write_text(f"names: {json.dumps(CLASSES)}\n")
    for split, (first, count) in SPLITS.items():
        scenes = [scene(first + number) for number in range(count)]
        write_coco(tree / "coco" / split, tree / "coco" / split / "_annotations.json", scenes)
        write_yolo(tree / "yolo" / split / "images", tree / "yolo" / split / "labels", scenes)
    return tree


def losses(lines):
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_both_layouts_and_any_split_of_an_update_are_one_training(train, folders, tmp_path):
    found = []
    for layout, more in {
        "coco": "trainer.gradient_accumulation_steps=1",
        "yolo": "trainer.gradient_accumulation_steps=4",
    }.items():
        run = tmp_path / layout
        words = [f"data.root={folders / layout}", "trainer.max_steps=3", more, f"run_dir={run}"]
        train([*SMALL, *words, "task.per_class=true", "trainer.precision=fp64"])
        found.append(logged(run))
    names = {name for line in found[0] for name in line}
    assert {"val/map_50_95", "val/map_50", "test/map_75", "val/map_zero"} <= names
    assert {"train/loss_classification", "train/loss_bbox_regression"} <= names
    assert len(losses(found[0])) == 3
    assert losses(found[0]) == pytest.approx(losses(found[1]), rel=1e-6)


def test_two_processes_and_evaluate_give_the_same_map(train, folders, tmp_path):
    words = [*SMALL, f"data.root={folders / 'coco'}", "trainer.max_steps=4", "model.score_thresh=0"]
    found = []
    for name, more in {"one": [], "two": ["strategy=ddp", "strategy.devices=2"]}.items():
        train([*words, *more, "trainer.precision=fp64", f"run_dir={tmp_path / name}"])
        last = {name: value for line in logged(tmp_path / name) for name, value in line.items()}
        found.append({name: last[name] for name in last if "t/map" in name or "l/map" in name})
    assert {"val/map_50_95", "test/map_50", "test/map_75"} <= found[0].keys()
    assert found[0]["val/map_50"] > 0
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    train([f"run={tmp_path / 'two'}", "loader.eval_batch_size=3"], command="evaluate")
    again = json.loads((tmp_path / "two/evaluation.json").read_text())
    for name in [name for name in found[0] if name.startswith("test/")]:
        assert again[name] == pytest.approx(found[0][name], rel=1e-6)


def test_a_wrong_annotation_ends_the_run_with_code_3(train, folders, tmp_path):
    content = json.loads((folders / "coco/train/_annotations.json").read_text())
    content["annotations"][6]["bbox"] = [0, 0, 900, 10]
    file = tmp_path / "train" / "_annotations.json"
    write_coco(file.parent, file, [scene(number) for number in range(32)])
    file.write_text(json.dumps(content))
    ended = train([*SMALL, f"data.root={tmp_path}", f"run_dir={tmp_path / 'run'}"], code=3)
    assert f"{file}: annotation 7: the box" in ended.err


@pytest.mark.slow
def test_a_short_training_finds_digits(start, tmp_path):
    pytest.importorskip("faster_coco_eval")
    for split, (first, count) in {"train": (0, 96), "val": (1000, 24)}.items():
        scenes = [scene(first + number) for number in range(count)]
        write_coco(tmp_path / split, tmp_path / split / "a.json", scenes)
    run = tmp_path / "run"
    words = ["experiment=detection", "transforms=none", "data.image_size=64", "loader.batch_size=8"]
    words += ["trainer.max_epochs=10", "trainer.validate_every_n_epochs=5"]
    start([*words, f"data.root={tmp_path}", f"run_dir={run}"]).wait(0, 600)
    lines = logged(run)
    first, *_, last = [line["train/epoch_loss"] for line in lines if "train/epoch_loss" in line]
    assert last < 0.5 * first
    values = [line["val/map_50"] for line in lines if "val/map_50" in line]
    assert values[-1] > max(values[0], 0.2)


@pytest.fixture(scope="module")
def trained(train, folders, tmp_path_factory):
    """A run of some updates, which finds many boxes, but none in a black picture."""
    path = tmp_path_factory.mktemp("trained") / "run"
    words = [*SMALL, f"data.root={folders / 'coco'}", "loader.num_workers=0"]
    words += ["trainer.max_steps=40", "trainer.log_every_n_steps=20", "transforms=none"]
    words += ["model.score_thresh=0.1", "callbacks=[default,boxes]"]
    train([*words, "trainer.validate_every_n_epochs=10", f"run_dir={path}"])
    return path


def by_hand(run, picture):
    """Return boxes as x, y, width, height, scores and labels, by nothing of ours but the network.

    The picture is brought to 64 pixels a side.
    """
    state = torch.load(run / "checkpoints/best.pt", weights_only=True)["model"]
    values = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "channels": 16}
    model = retinanet(3, 64, score_thresh=0.1, **values).eval()
    model.load_state_dict(state)
    pixels = torch.from_numpy(np.array(Image.open(picture).convert("RGB"))).movedim(-1, 0)
    height, width = pixels.shape[1:]
    rows = round(height * 64 / max(height, width))
    columns = round(width * 64 / max(height, width))
    image = torch.zeros(3, 64, 64)
    image[:, :rows, :columns] = F.resize(pixels, [rows, columns]) / 255
    with torch.no_grad():
        (answer,) = model(image[None])
    scale = torch.tensor([width / columns, height / rows] * 2)
    boxes = (answer["boxes"] * scale).clamp(torch.zeros(4), torch.tensor([width, height] * 2))
    boxes[:, 2:] -= boxes[:, :2]
    return boxes, answer["scores"], answer["labels"]


@pytest.fixture
def photographs(tmp_path):
    """Pictures of other sizes than those that were trained on, one of them black."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    for number, size in enumerate([(96, 130), (60, 33), (64, 64)]):
        Image.fromarray(scene(number, size)[0]).save(folder / f"a {number}.png")
    Image.new("L", (50, 40)).save(folder / "black.jpg")
    return folder


def test_predictions_are_those_of_plain_torch_in_pixels_of_the_picture(
    train, trained, photographs, tmp_path
):
    words = [f"run={trained}", f"source={photographs}", f"out={tmp_path / 'boxes.json'}"]
    train([*words, f"draw={tmp_path / 'drawn'}", "loader.num_workers=0"], command="predict")
    found = json.loads((tmp_path / "boxes.json").read_text())
    files = sorted(photographs.iterdir())
    assert {entry["file_name"] for entry in found} <= {str(file) for file in files}
    for index, file in enumerate(files):
        boxes, scores, labels = by_hand(trained, file)
        entries = [entry for entry in found if entry["image_id"] == index]
        assert len(entries) == len(boxes)
        assert [entry["category_id"] for entry in entries] == [10 * (n + 1) for n in labels]
        for entry, box, score in zip(entries, boxes.tolist(), scores.tolist(), strict=True):
            assert entry["file_name"] == str(file)
            assert entry["bbox"] == pytest.approx(box, abs=1e-3)
            assert entry["score"] == pytest.approx(score, abs=1e-5)
    assert len(found) > 10
    drawn = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert drawn == ["000000_a_0.png", "000001_a_1.png", "000002_a_2.png", "000003_black.png"]
    assert len(list(photographs.iterdir())) == 4

    row = load_run(trained, "cpu").predict([files[2]])[0]
    boxes, scores, labels = by_hand(trained, files[2])
    assert row["prediction"] == [CLASSES[label] for label in labels]
    np.testing.assert_allclose(row["bbox"], boxes, atol=1e-3)


@pytest.mark.slow
def test_a_table_is_the_same_from_two_processes(train, trained, photographs, tmp_path):
    words = [f"run={trained}", f"source={photographs}"]
    train([*words, f"out={tmp_path / 'all.json'}"], command="predict")
    found = json.loads((tmp_path / "all.json").read_text())
    least = float(np.median([entry["score"] for entry in found]))
    words = [*words, f"score_threshold={least}"]
    for name, more in {"one": [], "two": ["strategy=ddp", "strategy.devices=2"]}.items():
        train([*words, *more, f"out={tmp_path / name}.csv"], command="predict")
    texts = [(tmp_path / f"{name}.csv").read_text() for name in ("one", "two")]
    assert texts[0] == texts[1]
    with open(tmp_path / "one.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    expected = sum(entry["score"] >= least for entry in found)
    assert sum(row["prediction"] != "" for row in rows) == expected < len(found)
    # A picture without a box has a row, too.
    assert {row["file"] for row in rows} == {str(file) for file in photographs.iterdir()}


def test_results_of_a_split_are_those_that_coco_evaluates(train, trained, folders, tmp_path):
    from faster_coco_eval import COCO, COCOeval_faster

    out = tmp_path / "boxes.json"
    words = [f"run={trained}", "source=test", f"out={out}", f"draw={tmp_path / 'drawn'}"]
    train([*words, "loader.num_workers=0"], command="predict")
    truth = COCO(str(folders / "coco/test/_annotations.json"))
    evaluation = COCOeval_faster(truth, truth.loadRes(str(out)), iouType="bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    last = {name: value for line in logged(trained) for name, value in line.items()}
    assert last["test/map_50"] > 0
    assert evaluation.stats[0] == pytest.approx(last["test/map_50_95"], abs=2e-3)
    assert evaluation.stats[1] == pytest.approx(last["test/map_50"], abs=2e-3)
    # Truth and answer side by side: two pictures of 64 x 48, enlarged by 4, and a gap.
    with Image.open(tmp_path / "drawn/000000_000.png") as drawn:
        assert drawn.size == (2 * 256 + 8, 192)


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
    before = {path: path.read_bytes() for path in photographs.iterdir()}
    words = [word.format(folder=photographs) for word in words]
    words += [f"run={trained}", f"source={photographs}", f"out={tmp_path / 'b.csv'}"]
    error = train(words, 2, command="predict").error
    assert error.startswith(message.format(folder=photographs))
    assert {path: path.read_bytes() for path in photographs.iterdir()} == before


def test_a_file_has_the_boxes_of_the_model(train, trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    out = tmp_path / "onnx"
    words = [f"run={trained}", "format=onnx", f"out={out}"]
    train(words, command="export")
    facts = json.loads((out / "export.json").read_text())
    assert facts["input"]["shape"] == [1, 3, 64, 64]
    assert facts["verified"]["largest_difference"] <= 1e-4
    assert {"boxes", "scores", "labels"} <= facts["outputs"].keys()
    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    assert [value.name for value in session.get_outputs()] == ["boxes", "scores", "labels"]

    model = load_run(trained).model()
    pictures = [torch.zeros(3, 64, 64), torch.ones(3, 64, 64)]
    for number in range(4):
        pixels = np.pad(scene(number)[0], ((0, 16), (0, 0), (0, 0)))
        pictures.append(torch.from_numpy(pixels).movedim(-1, 0) / 255)
    counts = []
    for picture in pictures:
        boxes, scores, labels = session.run(None, {"input": picture[None].numpy()})
        with torch.no_grad():
            (expected,) = model(picture[None])
        counts.append(len(boxes))
        assert len(boxes) == len(expected["boxes"])
        np.testing.assert_allclose(scores, expected["scores"], atol=1e-5)
        # Boxes of nearly equal scores may change places: each has a near one of its class.
        for label in range(3):
            ours = expected["boxes"][expected["labels"] == label]
            theirs = torch.from_numpy(boxes[labels == label])
            assert len(theirs) == len(ours)
            if len(ours):
                distances = torch.cdist(ours.double(), theirs.double(), p=float("inf"))
                assert distances.amin(1).max() < 64 * 1e-4
    assert len(set(counts)) > 1
    words = [f"run={trained}", f"artefact={out / 'model.onnx'}"]
    train(words, command="evaluate")
    again = json.loads((trained / "evaluation.json").read_text())
    last = {name: value for line in logged(trained) for name, value in line.items()}
    assert again["test/map_50"] == pytest.approx(last["test/map_50"], abs=1e-6)


def test_a_format_that_holds_no_lists_is_refused(train, trained):
    error = train([f"run={trained}", "format=torch_export"], 2, command="export").error
    assert error.startswith("format=torch_export does not take a detector")
    assert not (trained / "exports").exists()
