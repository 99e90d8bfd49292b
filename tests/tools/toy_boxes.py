"""Scenes of digits with a box around each, written in COCO's and YOLO's layouts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CLASSES = ["zero", "one", "two"]
Boxes = list[tuple[int, tuple[int, int, int, int]]]  # class, x1 y1 x2 y2


def scene(number: int, size: tuple[int, int] = (48, 64)) -> tuple[NDArray[np.uint8], Boxes]:
    """Return a picture (height, width, 3) with up to two digits of 16 pixels, and their boxes."""
    from sklearn.datasets import load_digits

    draws = np.random.RandomState(number)
    digits = load_digits()
    height, width = size
    picture = np.zeros((height, width, 3), np.uint8)
    boxes: Boxes = []
    count = 1 + number % 2
    if number % 5 == 4:
        count = 0  # each fifth is empty
    for half in range(count):
        label = int(draws.randint(len(CLASSES)))
        candidates = np.flatnonzero(digits.target == label)
        chosen = digits.images[draws.choice(candidates)]
        ink = (chosen * 15.9).astype(np.uint8).repeat(2, 0).repeat(2, 1)
        left = half * width // 2 + int(draws.randint(width // 2 - 16 + 1))
        top = int(draws.randint(height - 16 + 1))
        picture[top : top + 16, left : left + 16] = ink[:, :, None]
        boxes.append((label, (left, top, left + 16, top + 16)))
    return picture, boxes


def coco(scenes: list[tuple[NDArray[np.uint8], Boxes]]) -> dict[str, Any]:
    """Return the content of a COCO file for scenes; ids count from 1, those of categories by 10."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (picture, boxes) in enumerate(scenes):
        height, width = picture.shape[:2]
        images.append(
            {
                "id": number + 1,
                "file_name": f"{number:03}.png",
                "width": width,
                "height": height,
            }
        )
        for label, (x1, y1, x2, y2) in boxes:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number + 1,
                    "category_id": 10 * (label + 1),
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "iscrowd": 0,
                }
            )
    categories = [{"id": 10 * (n + 1), "name": name} for n, name in enumerate(CLASSES)]
    return {"images": images, "annotations": annotations, "categories": categories}


def write_pictures(folder: Path, scenes: list[tuple[NDArray[np.uint8], Boxes]]) -> None:
    """Write the pictures of scenes as 000.png, 001.png, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (picture, _) in enumerate(scenes):
        Image.fromarray(picture).save(folder / f"{number:03}.png")


def write_coco(
    images: Path, file: Path, scenes: list[tuple[NDArray[np.uint8], Boxes]]
) -> dict[str, Any]:
    """Write pictures and a COCO file; return its content."""
    write_pictures(images, scenes)
    content = coco(scenes)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return content


def write_yolo(images: Path, labels: Path, scenes: list[tuple[NDArray[np.uint8], Boxes]]) -> None:
    """Write pictures and a text file for each that has boxes."""
    write_pictures(images, scenes)
    labels.mkdir(parents=True, exist_ok=True)
    for number, (picture, boxes) in enumerate(scenes):
        height, width = picture.shape[:2]
        lines = []
        for label, (x1, y1, x2, y2) in boxes:
            # Shares of the picture: the middle of the box, its width and height.
            x = (x1 + x2) / 2 / width
            y = (y1 + y2) / 2 / height
            lines.append(f"{label} {x} {y} {(x2 - x1) / width} {(y2 - y1) / height}\n")
        if lines:
            (labels / f"{number:03}.txt").write_text("".join(lines))
