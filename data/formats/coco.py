"""Annotation files of object detection: COCO's JSON and YOLO's text files, read and checked."""

import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from regimen.conf.errors import truncated_list
from regimen.conf.json_text import plain_json
from regimen.data.errors import DataError, as_data_error, check_regular
from regimen.data.formats.jsonl import read_lines
from regimen.data.image_folder import by_stem
from regimen.data.splits import NAMES

logger = logging.getLogger(__name__)
Box = tuple[float, float, float, float]  # x1, y1, x2, y2
InvalidBoxes = Literal["raise", "drop"]
_DESCRIPTIONS = ("data.yaml", "dataset.yaml", "data.yml", "dataset.yml")
# How far a box may reach beyond the edge, because a tool rounded: pixels, and shares of a side.
_PIXEL_MARGIN = 1.0
_SHARE_MARGIN = 0.01


class BoxArrays(NamedTuple):
    """The boxes of one picture (n, 4), the class of each, and whether it stands for a group (n)."""

    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    crowds: NDArray[np.bool_]


@dataclass
class Picture:
    """The boxes of one picture.

    `size`: width and height in pixels as the annotations state them. None: boxes are given in
    shares of width and height. `number`: its id in COCO's file.
    """

    path: str
    size: tuple[int, int] | None = None
    number: int | None = None
    boxes: list[Box] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    crowds: list[bool] = field(default_factory=list)  # whether a box stands for a group

    def add(self, box: Box, label: int, is_crowd: bool = False) -> None:
        """Add a box."""
        self.boxes.append(box)
        self.labels.append(label)
        self.crowds.append(is_crowd)

    def arrays(self) -> BoxArrays:
        """Return the boxes as arrays, which take a fraction of the memory."""
        boxes = np.array(self.boxes, np.float64).reshape(-1, 4)
        return BoxArrays(boxes, np.array(self.labels, np.int64), np.array(self.crowds, np.bool_))


@dataclass(frozen=True)
class Annotations:
    """The pictures of a split, and the names of the classes that their boxes have.

    `category_ids`: the number of each class in the files. None: they are no integers.
    """

    pictures: list[Picture]
    classes: list[str]
    category_ids: list[int] | None = None


@dataclass
class BoxCheck:
    """Clip boxes to their picture; those that are wrong are an error, or are left out."""

    on_invalid: InvalidBoxes
    dropped: int = 0

    def clip(
        self, box: Sequence[float], size: tuple[float, float], margin: float, where: str
    ) -> Box | None:
        """Return a box within its picture, None if it is left out. Raises DataError."""
        x1, y1, x2, y2 = box
        width, height = size
        problem = None
        if not all(map(math.isfinite, box)):
            problem = "has a number that is not finite"
        elif x2 <= x1 or y2 <= y1:
            problem = "has no area: x2 must be above x1, and y2 above y1"
        elif min(x1, y1) < -margin or x2 > width + margin or y2 > height + margin:
            problem = f"reaches out of its picture of {width:g} x {height:g}"
        clipped = (max(x1, 0.0), max(y1, 0.0), min(x2, width), min(y2, height))
        has_area = _has_area(clipped)
        if problem is None and not has_area:  # it lies within the margin, or is tiny
            problem = f"has no area in its picture of {width:g} x {height:g}"
        if problem is not None and self.on_invalid == "raise":
            numbers = ", ".join(f"{number:g}" for number in box)
            raise DataError(
                f"{where}: the box x1, y1, x2, y2 = {numbers} {problem}; mend it, or set "
                "data.invalid_boxes=drop"
            )
        if has_area:
            return clipped
        self.dropped += 1
        return None


def _has_area(box: Sequence[float]) -> bool:
    """Return whether a box has an area in float32, the type of samples; not with NaN."""
    x1, y1, x2, y2 = np.array(box, np.float32).tolist()
    return bool(x1 < x2 and y1 < y2)


class Place(NamedTuple):
    """Where the annotations of a split are."""

    annotations: Path  # COCO's file, or YOLO's folder of text files
    images: Path | None  # YOLO's folder of pictures; None: COCO's file names the pictures


def find_annotations(tree: Path, split: str) -> Place | None:
    """Find the annotations of a split in whichever layout a folder has; None without the split.

    COCO: a JSON file in `<split>/` beside its pictures, or `annotations/instances_<split>*.json`.
    YOLO: `<split>/images` and `<split>/labels`, or `images/<split>` and `labels/<split>`. A year
    may follow the name of the split (train2017). Raises DataError where there are several.
    """
    places = [Place(file, None) for file in _coco_files(tree, split)]
    places += [Place(labels, images) for images, labels in _yolo_folders(tree, split)]
    if len(places) > 1:
        named = ", ".join(str(place.annotations) for place in places)
        raise DataError(
            f"data.root={tree}: {split!r} has more than one set of annotations: {named}"
        )
    return places[0] if places else None


def read_annotations(
    tree: Path,
    place: Place,
    classes: Sequence[str] | None = None,
    on_invalid: InvalidBoxes = "raise",
) -> Annotations:
    """Read the annotations at a place in the folder `tree`.

    `classes`: names in the order of their numbers; None: those of COCO's file in the order of their
    ids, or those of YOLO's data.yaml. Raises DataError with file and annotation.
    """
    check = BoxCheck(on_invalid)
    file = place.annotations
    names = None
    if classes is not None:
        names = _distinct_texts(classes)
        if names is None:
            raise DataError(
                f"data.classes={classes!r}: give a list of different names, as [cat,dog]"
            )
    if place.images is None:
        result = read_coco(file, _picture_folders(tree, file), names, check)
    else:
        result = read_yolo(place.images, file, tree, names, check)
    if check.dropped:
        logger.warning("warning: %s: left out %d invalid boxes", file, check.dropped)
    if not have_boxes(result.pictures):
        raise DataError(
            f"{file}: there is no box in any of {len(result.pictures)} pictures "
            "(those with iscrowd do not count)"
        )
    return result


def have_boxes(pictures: Sequence[Picture]) -> bool:
    """Return whether there is a box that is no crowd's."""
    return any(False in picture.crowds for picture in pictures)


def _coco_files(tree: Path, split: str) -> list[Path]:
    names = "|".join(NAMES[split])
    pattern = re.compile(rf"(instances_)?({names})(\d{{4}})?", re.I)
    files = []
    for name in NAMES[split]:
        files += sorted((tree / name).glob("*.json"))
    for folder in (tree / "annotations", tree):
        for file in sorted(folder.glob("*.json")):
            if pattern.fullmatch(file.stem):
                files.append(file)
    return files


def _yolo_folders(tree: Path, split: str) -> list[tuple[Path, Path]]:
    """Return the pairs of folders of pictures and of labels that a split has."""
    names = "|".join(NAMES[split])
    pattern = re.compile(rf"({names})(\d{{4}})?")
    candidates = []
    for name in NAMES[split]:
        candidates.append((tree / name / "images", tree / name / "labels"))
    for folder in sorted((tree / "images").glob("*")):
        if pattern.fullmatch(folder.name):
            candidates.append((folder, tree / "labels" / folder.name))
    pairs = []
    for images, labels in candidates:
        if images.is_dir() and labels.is_dir():
            pairs.append((images, labels))
    return pairs


def _picture_folders(tree: Path, file: Path) -> list[Path]:
    """Return the folders in which the pictures of a COCO file may lie."""
    beside = [file.parent, file.parent / "images", file.parent / "data"]
    if file.parent not in (tree, tree / "annotations"):
        return beside
    name = file.stem.removeprefix("instances_")
    without_year = name.rstrip("0123456789")
    places = [tree / name, tree / without_year, tree / "images" / name]
    return [*places, tree / "images" / without_year, tree / "images", tree]


def read_coco(
    file: Path, folders: Sequence[Path], classes: Sequence[str] | None, check: BoxCheck
) -> Annotations:
    """Read a COCO file, whose pictures lie in one of `folders`. Raises DataError."""
    check_regular(file)
    with as_data_error(f"{file}: cannot be read as JSON", OSError, ValueError):
        content = plain_json(file.read_text("utf-8-sig"))
    # Of values of other types; Python's integers may be too large for a floating number.
    errors = (TypeError, AttributeError, OverflowError)
    with as_data_error(f"{file}: is no COCO annotation file", *errors):
        annotations = _entries(content, "annotations", file)
        names, number_of = _categories(file, content, annotations, classes)
        pictures = _coco_pictures(file, _entries(content, "images", file), folders)
        for entry in annotations:
            where = f"{file}: annotation {entry.get('id')}"
            picture = pictures.get(_value(entry, "image_id", where))
            if picture is None:
                raise DataError(f"{where}: there is no image with the id {entry['image_id']!r}")
            label = number_of.get(_value(entry, "category_id", where))
            if label is None:
                raise DataError(
                    f"{where}: category_id {entry['category_id']!r} is none of the classes: "
                    f"{truncated_list(names, 10)}"
                )
            box = _corners(_value(entry, "bbox", where), where)
            assert picture.size is not None
            clipped = check.clip(box, picture.size, _PIXEL_MARGIN, where)
            is_crowd = _is_crowd(entry, where)
            if clipped is not None:
                picture.add(clipped, label, is_crowd)
    return Annotations(list(pictures.values()), names, _category_ids(names, number_of))


def _entries(content: Mapping[str, Any], key: str, file: Path) -> list[Mapping[str, Any]]:
    entries = content.get(key)
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{file}: has no {key}: a COCO file lists images, annotations, categories")
    return entries


def _value(entry: Mapping[str, Any], key: str, where: str) -> Any:
    if entry.get(key) is None:
        raise DataError(f"{where}: has no {key!r}")
    return entry[key]


def _corners(box: Any, where: str) -> Box:
    """Return x1, y1, x2, y2 of COCO's x, y, width, height."""
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        raise DataError(f"{where}: bbox is {box!r}, not the four numbers x, y, width, height")
    x, y, width, height = map(float, box)
    return x, y, x + width, y + height


def _is_crowd(entry: Mapping[str, Any], where: str) -> bool:
    """Return whether a box stands for a group; it need not say so. Raises DataError."""
    stated = entry.get("iscrowd")
    if stated not in (None, 0, 1):  # true and false are equal to 1 and 0
        raise DataError(f"{where}: iscrowd is {stated!r}: 1 for a box around a group, else 0")
    return bool(stated)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _categories(
    file: Path,
    content: Mapping[str, Any],
    annotations: Iterable[Mapping[str, Any]],
    classes: Sequence[str] | None,
) -> tuple[list[str], dict[Any, int]]:
    """Return the names of the classes, in the order of their ids, and the number of each id."""
    categories = _entries(content, "categories", file)
    name_of: dict[Any, str] = {}
    for category in sorted(categories, key=lambda category: _value(category, "id", str(file))):
        name = str(_value(category, "name", f"{file}: category {category['id']}"))
        if category["id"] in name_of or name in name_of.values():
            raise DataError(f"{file}: category {category['id']} ({name!r}) stands there twice")
        name_of[category["id"]] = name
    if classes is not None:
        return [*classes], _class_numbers(name_of, classes)

    # Exports of labelling tools have a category for the background, or for all classes together
    # (of the supercategory "none", and itself the others' supercategory), that no box has.
    used = {entry.get("category_id") for entry in annotations}
    parents = {category.get("supercategory") for category in categories}
    for category in categories:
        name = name_of[category["id"]]
        is_root = category.get("supercategory") == "none" and name in parents
        is_background = name.lower().strip("_") == "background"  # also __background__
        if category["id"] not in used and (is_root or is_background):
            del name_of[category["id"]]
            logger.info("%s: category %r has no box: it is no class", file, name)
    names = [*name_of.values()]
    return names, _class_numbers(name_of, names)


def _class_numbers(name_of: Mapping[Any, str], classes: Sequence[str]) -> dict[Any, int]:
    """Return the place in `classes` of each id in the files whose name is among them."""
    numbers = {}
    for category_id, name in name_of.items():
        if name in classes:
            numbers[category_id] = classes.index(name)
    return numbers


def _category_ids(names: Sequence[str], number_of: Mapping[Any, int]) -> list[int] | None:
    """Return the id of each class in the files; None if none has one that is an integer.

    A class that the files lack has an id above all of theirs.
    """
    id_of = {number: key for key, number in number_of.items() if isinstance(key, int)}
    if not id_of:
        return None
    free = max(id_of.values()) + 1
    ids = []
    for number in range(len(names)):
        if number not in id_of:
            id_of[number] = free
            free += 1
        ids.append(id_of[number])
    return ids


def _coco_pictures(
    file: Path, images: Sequence[Mapping[str, Any]], folders: Sequence[Path]
) -> dict[Any, Picture]:
    """Return the pictures by id, in the order of their ids."""
    found: dict[Any, Picture] = {}
    for image in sorted(images, key=lambda image: _value(image, "id", str(file))):
        where = f"{file}: image {image['id']}"
        if image["id"] in found:
            raise DataError(f"{where}: stands there twice")
        name = str(_value(image, "file_name", where))
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise DataError(f"{where}: file_name {name[:80]!r} leads out of the folder")
        size = (_value(image, "width", where), _value(image, "height", where))
        if not all(_is_number(side) and 0 < side < math.inf for side in size):
            raise DataError(f"{where}: width and height are {size[0]!r} and {size[1]!r}")
        # The folder of the last picture is the likeliest.
        for folder in folders:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                folders = [folder, *(other for other in folders if other != folder)]
                break
        else:
            places = ", ".join(map(str, folders))
            raise DataError(f"{where}: there is no file {name[:200]} in {places}")
        number = image["id"] if isinstance(image["id"], int) else None
        found[image["id"]] = Picture(path, size, number)
    return found


def read_yolo(
    images: Path, labels: Path, tree: Path, classes: Sequence[str] | None, check: BoxCheck
) -> Annotations:
    """Read the pictures of a folder and their text files of the same names. Raises DataError.

    A line holds a class number and a box (centre x and y, width, height) or the corners of a
    polygon, in shares of the picture's width and height. A picture without a file has no box.
    """
    names, number_of = _yolo_classes(tree, classes)
    pictures = []
    # labelImg writes the names of its classes beside the boxes.
    unused = {str(file) for file in labels.rglob("*.txt") if file.name != "classes.txt"}
    for name, path in by_stem(images, "pictures").items():
        picture = Picture(path)
        pictures.append(picture)
        file = labels / f"{name}.txt"
        unused.discard(str(file))
        if not os.path.lexists(file):
            continue
        for line_number, line in enumerate(read_lines(file), 1):
            if not line.strip():
                continue
            where = f"{file}: line {line_number}"
            label, box = _yolo_line(line, where)
            if label not in number_of:
                raise DataError(
                    f"{where}: class {label} is unknown, {len(number_of)} classes are known: "
                    f"{truncated_list(names, 10)}"
                )
            clipped = check.clip(box, (1.0, 1.0), _SHARE_MARGIN, where)
            if clipped is not None:
                picture.add(clipped, number_of[label])
    if unused:
        logger.warning("%s: %d files belong to no picture", labels, len(unused))
    return Annotations(pictures, names, _category_ids(names, number_of))


def _yolo_line(line: str, where: str) -> tuple[int, Box]:
    words = line.split()
    try:
        label = int(words[0])
        numbers = [*map(float, words[1:])]
    except ValueError:
        numbers = []  # refused below
    if len(numbers) == 4:
        x, y, width, height = numbers
        return label, (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    if len(numbers) >= 6 and len(numbers) % 2 == 0:
        corners = np.reshape(numbers, (-1, 2))
        # Unlike Python's min and max, these are NaN if a corner is.
        x1, y1 = corners.min(0).tolist()
        x2, y2 = corners.max(0).tolist()
        return label, (x1, y1, x2, y2)
    raise DataError(
        f"{where}: {line.strip()[:80]!r} is not a class number and x, y, width, height "
        "(or the corners of a polygon)"
    )


def _yolo_classes(tree: Path, classes: Sequence[str] | None) -> tuple[list[str], dict[int, int]]:
    """Return the names of the classes, and the number of each class number of the files."""
    file = next((tree / name for name in _DESCRIPTIONS if (tree / name).is_file()), None)
    if file is None:
        if classes is None:
            raise DataError(
                f"data.root={tree} has no data.yaml with the names of the classes: write "
                "`names: [cat, dog]` there, or set data.classes=[cat,dog]"
            )
        names = classes
    else:
        names = _yolo_names(file)
    if classes is None:
        classes = names
    return [*classes], _class_numbers(dict(enumerate(names)), classes)


def _distinct_texts(names: Any) -> list[str] | None:
    """Return a list of names or whole numbers as texts; None if it is another, or has one twice."""
    if not isinstance(names, list | tuple) or not names:
        return None
    for name in names:
        # YAML reads an unquoted yes or no as a truth value.
        if not isinstance(name, str | int) or isinstance(name, bool):
            return None
    texts = [*map(str, names)]
    return texts if len({*texts}) == len(texts) else None


def _yolo_names(file: Path) -> list[str]:
    """Return the names of the classes that a data.yaml states. Raises DataError."""
    kinds = (OSError, ValueError, yaml.YAMLError, RecursionError)
    with as_data_error(f"{file}: cannot be read as YAML", *kinds):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, dict) and [*names] == [*range(len(names))]:
        names = [*names.values()]
    texts = _distinct_texts(names)
    if texts is None:
        raise DataError(
            f"{file}: names must be a list of different names, or give one to each of 0, 1, ... "
            "(yes, no and null in quotes)"
        )
    count = content.get("nc", len(texts))
    if count != len(texts):
        raise DataError(
            f"{file}: nc is {count}, but there are {len(texts)} names: the background is no class"
        )
    return texts
