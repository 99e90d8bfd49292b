"""experiment=detection: trains from a folder in either layout, on any split of an update."""

import json

import pytest

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
