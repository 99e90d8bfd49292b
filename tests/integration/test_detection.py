"""The project in examples/detection: boxes through v2 transforms, a list for a batch, mAP."""

import json
from pathlib import Path

import pytest
import torch
from torchvision.transforms import v2

from examples.detection.data import DigitBoxes

pytest.importorskip("pycocotools", reason="torchmetrics' mAP takes pycocotools")

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("--config-dir", "examples/detection/conf", "experiment=detection", "trainer.max_steps=2"),
    *("loader.batch_size=4", "trainer.limit_val_batches=2", "trainer.limit_test_batches=1"),
    *("callbacks.boxes.least=0", "trainer.log_every_n_steps=1"),
]


def test_boxes_train_and_the_split_of_an_update_changes_nothing(train, tmp_path):
    losses = []
    for parts in (1, 4):
        folder = tmp_path / str(parts)
        run = train(
            [*SMALL, f"trainer.gradient_accumulation_steps={parts}", f"run_dir={folder}"],
            folder=ROOT,
        )
        assert run.code == 0, run.err
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert {"val/map_50", "test/map_50_95"} <= {key for line in lines for key in line}
        losses.append([line["train/loss"] for line in lines if "train/loss" in line])
        assert any("tfevents" in path.name for path in (folder / "tensorboard").rglob("*"))
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def mirrored(image, target):
    boxes = v2.functional.horizontal_flip(target["boxes"])
    return v2.functional.horizontal_flip(image), {**target, "boxes": boxes}


def test_boxes_follow_their_image():
    plain, flipped = DigitBoxes("val"), DigitBoxes("val", augment=mirrored)
    for index in range(0, len(plain), 50):
        image, target = plain[index]
        other, moved = flipped[index]
        torch.testing.assert_close(other, image.flip(-1))
        assert torch.equal(moved["labels"], target["labels"])
        left, top, right, bottom = target["boxes"].T
        expected = torch.stack([64 - right, top, 64 - left, bottom], 1)
        assert torch.equal(moved["boxes"], expected)
        assert all(image[:, y:b, x:r].any() for x, y, r, b in target["boxes"].int().tolist())
