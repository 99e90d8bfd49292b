"""Folders of pictures and boxes: the same samples in each layout, or an error with file and box."""

import json
import os

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.data.errors import DataError
from regimen.data.formats.detection_folder import collate_boxes, detection_folder
from regimen.data.loading.loader import Loader
from regimen.data.orders import Sequential
from regimen.data.samplers import UpdateSampler
from regimen.data.scenes import DigitBoxes
from regimen.data.sources import fingerprint
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.data import build_data
from regimen.trainer.tasks.detection import Detection
from toy_boxes import CLASSES, coco, scene, write_coco, write_pictures, write_yolo

SCENES = [scene(number) for number in range(6)]
YAML = f"names: {json.dumps(CLASSES)}\nnc: 3\n"


def layout_beside(tree, split, scenes):
    write_coco(tree / split, tree / split / "_annotations.coco.json", scenes)


def layout_instances(tree, split, scenes):
    file = tree / "annotations" / f"instances_{split}2017.json"
    write_coco(tree / f"{split}2017", file, scenes)


def layout_instances_images(tree, split, scenes):
    write_coco(tree / "images" / split, tree / "annotations" / f"{split}.json", scenes)


def layout_data_folder(tree, split, scenes):
    write_coco(tree / split / "data", tree / split / "labels.json", scenes)


def layout_yolo(tree, split, scenes):
    tree.mkdir(exist_ok=True)
    (tree / "data.yaml").write_text(YAML)
    write_yolo(tree / split / "images", tree / split / "labels", scenes)


def layout_yolo_by_kind(tree, split, scenes):
    tree.mkdir(exist_ok=True)
    (tree / "data.yaml").write_text("names: {0: zero, 1: one, 2: two}\n")
    write_yolo(tree / "images" / split, tree / "labels" / split, scenes)


LAYOUTS = [
    layout_beside,
    layout_instances,
    layout_instances_images,
    layout_data_folder,
    layout_yolo,
    layout_yolo_by_kind,
]


def content_of(tree, split="train", name="a.json"):
    """Write the scenes in COCO's layout; return its file and the file's content."""
    file = tree / split / name
    return file, write_coco(file.parent, file, SCENES)


def labels_of(index):
    _, boxes = SCENES[index]
    return [label for label, _ in boxes]


def boxes_of(index):
    """Return the boxes of a scene, (boxes, 4)."""
    _, boxes = SCENES[index]
    return torch.tensor([box for _, box in boxes], dtype=torch.float32).reshape(-1, 4)


def opened(tree, split="train", **options):
    options = {"image_size": 64, "val_fraction": 0, **options}
    return detection_folder(str(tree), split, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("val", ["val", "valid"])
def test_each_layout_gives_the_boxes_of_the_scenes(tmp_path, layout, val):
    layout(tmp_path, "train", SCENES)
    layout(tmp_path, val, SCENES[:2])

    train = opened(tmp_path)

    assert train.classes == CLASSES
    assert len(train) == 6  # pictures without boxes are kept
    for index, (picture, _) in enumerate(SCENES):
        image, target = train[index]
        assert image.shape == (3, 64, 64)
        assert image.dtype == torch.float32
        # 48 x 64 pixels: nothing is scaled, and what is missing below is black.
        expected = torch.from_numpy(picture).permute(2, 0, 1) / 255
        torch.testing.assert_close(image[:, :48].as_subclass(torch.Tensor), expected)
        assert not image[:, 48:].any()
        assert isinstance(target["boxes"], tv_tensors.BoundingBoxes)
        found = target["boxes"].as_subclass(torch.Tensor)
        torch.testing.assert_close(found, boxes_of(index))
        assert target["labels"].tolist() == labels_of(index)
        assert int(target["image_id"]) == index
    assert len(opened(tmp_path, "val")) == 2
    assert opened(tmp_path, "test") is None


def test_pictures_and_boxes_are_scaled_into_the_square(tmp_path):
    narrow = scene(0, (64, 32))
    layout_beside(tmp_path, "train", [narrow])

    image, target = opened(tmp_path, image_size=128)[0]

    assert image.shape == (3, 128, 128)
    assert not image[:, :, 64:].any()
    _, boxes = narrow
    expected = [[2.0 * edge for edge in box] for _, box in boxes]
    assert target["boxes"].tolist() == expected


def test_a_missing_val_is_cut_from_train(tmp_path):
    layout_yolo(tmp_path, "train", SCENES)

    train = opened(tmp_path, val_fraction=0.34)
    val = opened(tmp_path, "val", val_fraction=0.34)

    assert len(train) == 4
    assert len(val) == 2
    assert len({*train.names, *val.names}) == 6


def test_folds_share_the_pictures_out(tmp_path):
    layout_yolo(tmp_path, "train", SCENES)

    names = []
    for fold in range(3):
        names.extend(opened(tmp_path, "val", fold=fold, folds=3).names)

    assert sorted(names) == sorted(opened(tmp_path).names)


@pytest.fixture
def crowded(tmp_path):
    """Scenes whose first box is that of a crowd, for training and validation."""
    for split in ("train", "val"):
        file, content = content_of(tmp_path, split)
        content["annotations"][0]["iscrowd"] = 1
        file.write_text(json.dumps(content))
    return tmp_path


def test_crowds_are_left_out_of_training(crowded):
    _, target = opened(crowded)[0]

    assert len(target["boxes"]) == len(labels_of(0)) - 1
    assert "iscrowd" not in target


def test_crowds_are_ignored_by_an_evaluation(crowded):
    _, target = opened(crowded, "val")[0]

    others = len(labels_of(0)) - 1
    assert target["iscrowd"].tolist() == [1] + [0] * others


def test_boxes_of_crowds_alone_are_none(tmp_path):
    file, content = content_of(tmp_path)
    for annotation in content["annotations"]:
        annotation["iscrowd"] = 1
    file.write_text(json.dumps(content))

    with pytest.raises(DataError, match="there is no box in any of 6 pictures"):
        opened(tmp_path)


def test_a_part_of_train_without_boxes_is_refused(tmp_path):
    empty = [scene(4)] * 19  # one of twenty pictures has a box
    layout_beside(tmp_path, "train", [SCENES[0], *empty])

    assert len(opened(tmp_path, val_fraction=0.1)) == 18
    with pytest.raises(DataError, match="none of 2 pictures of 'val', a part of train, has a box"):
        opened(tmp_path, "val", val_fraction=0.1)


def test_a_category_of_all_classes_or_of_the_background_is_no_class(tmp_path):
    file, content = content_of(tmp_path)
    for category in content["categories"]:
        category["supercategory"] = "digits"
    content["categories"] += [
        {"id": 0, "name": "digits", "supercategory": "none"},
        {"id": 5, "name": "Background"},
    ]
    file.write_text(json.dumps(content))

    train = opened(tmp_path)

    assert train.classes == CLASSES
    _, target = train[0]
    assert target["labels"].tolist() == labels_of(0)


@pytest.mark.parametrize("layout", [layout_beside, layout_yolo])
def test_names_may_be_given_in_another_order(tmp_path, layout):
    layout(tmp_path, "train", SCENES)
    turned = CLASSES[::-1]

    train = opened(tmp_path, classes=turned)

    assert train.classes == turned
    _, target = train[0]
    assert target["labels"].tolist() == [2 - label for label in labels_of(0)]


def test_yolo_takes_polygons_by_their_box(tmp_path):
    layout_yolo(tmp_path, "train", SCENES)
    (tmp_path / "train/labels/000.txt").write_text("1 0.25 0.5 0.5 0.25 0.75 0.5 0.5 0.75\n")

    _, target = opened(tmp_path)[0]

    assert target["boxes"].tolist() == [[16, 12, 48, 36]]


@pytest.mark.parametrize("name", ["background", "__background__", "_background_"])
def test_the_background_is_no_class_however_it_is_written(tmp_path, name):
    file, content = content_of(tmp_path)
    content["categories"].append({"id": 0, "name": name, "supercategory": ""})
    file.write_text(json.dumps(content))

    assert opened(tmp_path).classes == CLASSES


@pytest.mark.parametrize("classes", ["zero", ["zero", "one", "one"], [], ["zero", None]])
def test_classes_that_are_no_list_of_different_names_are_refused(tmp_path, classes):
    layout_beside(tmp_path, "train", SCENES)

    with pytest.raises(DataError, match=r"data\.classes=.*: give a list of different names"):
        opened(tmp_path, classes=classes)


def test_greys_of_16_bits_are_scaled_by_their_range(tmp_path):
    file, _ = content_of(tmp_path)
    for number, (picture, _) in enumerate(SCENES):
        values = picture[..., 0].astype(np.uint16) * 16  # 12 bits of 16
        Image.fromarray(values).save(file.parent / f"{number:03}.png")

    dim, _ = opened(tmp_path)[0]
    image, _ = opened(tmp_path, value_range=[0, 4095])[0]

    assert dim.max() < 0.1
    torch.testing.assert_close(image.max().item(), SCENES[0][0].max() / 255, rtol=0, atol=0.01)


def test_the_fingerprint_is_that_of_names_and_boxes(tmp_path):
    layout_yolo(tmp_path, "train", SCENES)
    before = fingerprint(opened(tmp_path))
    assert fingerprint(opened(tmp_path)) == before
    (tmp_path / "train/labels/000.txt").write_text("1 0.5 0.5 0.25 0.25\n")
    assert fingerprint(opened(tmp_path)) != before


def test_torchvisions_transforms_move_the_boxes(tmp_path):
    layout_beside(tmp_path, "train", SCENES)
    plain = opened(tmp_path)
    flipped = opened(tmp_path, transform=v2.RandomHorizontalFlip(p=1.0))

    for index in range(len(plain)):
        image, target = plain[index]
        other, moved = flipped[index]
        assert torch.equal(other, image.flip(-1))
        left, top, right, bottom = target["boxes"].T
        expected = torch.stack([64 - right, top, 64 - left, bottom], 1)
        assert torch.equal(moved["boxes"], expected)
        for left, top, right, bottom in moved["boxes"].int().tolist():
            assert other[:, top:bottom, left:right].any()


def test_a_box_that_a_crop_leaves_without_area_goes_with_its_label(tmp_path):
    for split in ("train", "val"):
        layout_beside(tmp_path, split, SCENES)
    # The left half of 64 pixels, of scenes with a digit in each half.
    half = v2.Lambda(lambda part: v2.functional.crop(part, 0, 0, 48, 32), tv_tensors.Image)
    boxes = v2.Lambda(lambda part: v2.functional.crop(part, 0, 0, 48, 32), tv_tensors.BoundingBoxes)
    crop = v2.Compose([half, boxes])

    for split in ("train", "val"):
        cropped = opened(tmp_path, split, transform=crop)
        for index, (_, scene_boxes) in enumerate(SCENES):
            _, target = cropped[index]
            inside = [label for label, (left, *_) in scene_boxes if left < 32]
            assert target["labels"].tolist() == inside
            assert len(target["boxes"]) == len(inside)
            assert (target["boxes"][:, 2:] > target["boxes"][:, :2]).all()
            if split == "val":
                assert len(target["iscrowd"]) == len(inside)


def _without_first(pair):
    """Leave out the first box, and not its label."""
    image, target = pair
    return image, {**target, "boxes": target["boxes"][1:]}


def test_a_transform_that_parts_boxes_from_their_labels_is_refused(tmp_path):
    layout_beside(tmp_path, "train", SCENES)

    with pytest.raises(DataError, match="left 0 boxes, but 1 labels"):
        opened(tmp_path, transform=_without_first)[0]


def _as_plain(pair):
    """Return boxes as the plain tensor that an operation on them gives."""
    image, target = pair
    return image, {**target, "boxes": target["boxes"] + 0}


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(v2.ConvertBoundingBoxFormat("CXCYWH"), id="another format"),
        pytest.param(_as_plain, id="plain tensor"),
    ],
)
def test_boxes_are_corners_whatever_form_a_transform_leaves(tmp_path, transform):
    layout_beside(tmp_path, "train", SCENES)
    transformed = opened(tmp_path, transform=transform)

    for index in range(len(SCENES)):
        _, target = transformed[index]
        assert isinstance(target["boxes"], tv_tensors.BoundingBoxes)
        found = target["boxes"].as_subclass(torch.Tensor)
        torch.testing.assert_close(found, boxes_of(index))


MODULE = "regimen.data.batch_transforms"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("transforms=basic", "transforms.train.to_float: takes an image alone"),
        (
            f"+transforms.device.flip={{_target_: {MODULE}.RandomVerticalFlip}}",
            "transforms.device.flip: moves the image and not its boxes",
        ),
        (
            f"+transforms.device.crop={{_target_: {MODULE}.RandomCrop, size: 8}}",
            "transforms.device.crop: moves the image and not its boxes",
        ),
    ],
)
def test_transforms_that_leave_boxes_behind_are_refused(augmentation_words, word, said):
    config = parse(compose([*augmentation_words, word]).config)

    with pytest.raises(ConfigError, match=said):
        build_data(config, ["train"])


def augmented(config, batch_size, workers):
    """Return the samples of the second epoch, as (image, target)."""
    train = build_data(config, ["train"]).sets["train"]
    sampler = UpdateSampler(Sequential(20), batch_size=batch_size)
    loader = Loader(train, sampler, seed=0, collate_fn=collate_boxes, num_workers=workers)
    samples = []
    for micro in loader.epoch(1):
        images, targets = micro.batch
        samples += zip(images, targets, strict=True)
    loader.close()
    return samples


@pytest.fixture
def augmentation_words(tmp_path):
    """The words of a configuration of detection with twenty scenes."""
    layout_beside(tmp_path, "train", [scene(number) for number in range(20)])
    words = ["data=detection", f"data.root={tmp_path}", "data.image_size=64"]
    return [*words, "data.val_fraction=0"]


@pytest.fixture
def augmentation(augmentation_words):
    """A configuration of detection with twenty scenes."""
    return parse(compose(augmentation_words).config)


def test_the_augmentation_keeps_boxes_on_their_objects(augmentation):
    left_out = 0
    for index, (image, target) in enumerate(augmented(augmentation, 4, workers=0)):
        _, boxes = scene(index)
        assert len(target["boxes"]) == len(target["labels"]) <= len(boxes)
        for box in target["boxes"]:
            left, top = box[:2].floor().int().tolist()
            right, bottom = box[2:].ceil().int().tolist()
            assert 0 <= left < right <= 64
            assert 0 <= top < bottom <= 64
            assert image[:, top:bottom, left:right].std() > 0.02  # a part of a digit
        left_out += len(boxes) - len(target["boxes"])
    assert left_out > 0  # by a crop


def test_the_augmentation_is_keyed_by_sample(augmentation):
    samples = augmented(augmentation, 4, workers=0)
    others = augmented(augmentation, 5, workers=2)

    for (image, target), (other_image, other_target) in zip(samples, others, strict=True):
        assert torch.equal(image, other_image)
        assert torch.equal(target["boxes"], other_target["boxes"])


def test_samples_become_a_batch_of_plain_tensors(tmp_path):
    layout_beside(tmp_path, "train", SCENES)
    train = opened(tmp_path)

    images, targets = collate_boxes([train[index] for index in range(6)])

    assert type(images) is torch.Tensor
    assert images.shape == (6, 3, 64, 64)
    for target in targets:
        for value in target.values():
            assert type(value) is torch.Tensor


# What is wrong in a COCO file, and what the message names.
def _set(part, index, **values):
    def change(content):
        content[part][index].update(values)

    return change


def _remove(part, key=None):
    def change(content):
        if key is None:
            del content[part]
        else:
            del content[part][0][key]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            _set("annotations", 1, bbox=[60, 0, 16, 16]),
            "annotation 2: the box x1, y1, x2, y2 = 60, 0, 76, 16 reaches out of its picture",
            id="outside",
        ),
        pytest.param(
            _set("annotations", 1, bbox=[30, 0, -16, 16]),
            "annotation 2: the box x1, y1, x2, y2 = 30, 0, 14, 16 has no area",
            id="x2 below x1",
        ),
        pytest.param(
            _set("annotations", 1, bbox=[30, 0, 0, 16]), "annotation 2: the box", id="no area"
        ),
        pytest.param(
            _set("annotations", 1, bbox=[30, 0, 1e-9, 16]), "annotation 2: the box", id="tiny"
        ),
        pytest.param(
            _set("annotations", 1, bbox=[0, float("nan"), 1, 1]), "not finite", id="not a number"
        ),
        pytest.param(
            _set("annotations", 1, iscrowd="0"), "annotation 2: iscrowd is '0'", id="crowd in words"
        ),
        pytest.param(
            _set("annotations", 1, bbox=[0, 1, 1]), "annotation 2: bbox is", id="three numbers"
        ),
        pytest.param(
            _set("annotations", 1, category_id=99),
            "annotation 2: category_id 99 is none of the classes: zero, one, two",
            id="unknown class",
        ),
        pytest.param(
            _set("annotations", 1, image_id=99), "annotation 2: there is no image", id="no image"
        ),
        pytest.param(_remove("annotations", "bbox"), "annotation 1: has no 'bbox'", id="no box"),
        pytest.param(
            _set("images", 1, file_name="lost.png"),
            "image 2: there is no file lost.png in",
            id="missing picture",
        ),
        pytest.param(
            _set("images", 1, file_name="/etc/passwd"), "leads out of the folder", id="absolute"
        ),
        pytest.param(
            _set("images", 1, file_name="../a.png"), "leads out of the folder", id="outside of it"
        ),
        pytest.param(
            _set("images", 1, height=float("nan")), "image 2: width and height", id="odd size"
        ),
        pytest.param(_set("images", 1, id=1), "image 1: stands there twice", id="two images"),
        pytest.param(_set("images", 1, width="wide"), "image 2: width and height", id="no size"),
        pytest.param(_remove("annotations"), "has no annotations", id="without annotations"),
        pytest.param(_remove("categories"), "has no categories", id="without categories"),
        pytest.param(_set("categories", 1, name="zero"), "('zero') stands there twice", id="twice"),
    ],
)
def test_a_wrong_coco_file_is_named_with_the_annotation(tmp_path, change, said):
    file = tmp_path / "train/_annotations.coco.json"
    content = write_coco(tmp_path / "train", file, SCENES)
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(DataError) as error:
        opened(tmp_path)
    assert said in str(error.value)
    assert str(file) in str(error.value)
    assert error.value.exit_code == 3


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"images": 3}', '{"images": [3]}', "[" * 9999])
def test_a_file_that_is_none_of_cocos_is_named(tmp_path, text):
    write_pictures(tmp_path / "train", SCENES)
    (tmp_path / "train/a.json").write_text(text)
    with pytest.raises(DataError, match=r"train/a\.json: "):
        opened(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        _set("images", 1, width=10**400),
        _set("annotations", 1, bbox=[10**400, 0, 1, 1]),
    ],
    ids=["width", "bbox"],
)
def test_numbers_beyond_all_floating_ones_are_refused(tmp_path, change):
    file = tmp_path / "train/_annotations.coco.json"
    content = write_coco(tmp_path / "train", file, SCENES)
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"is no COCO annotation file: OverflowError"):
        opened(tmp_path)


def test_files_of_windows_are_read_as_others(tmp_path):
    layout_yolo(tmp_path / "yolo", "train", SCENES)
    file = tmp_path / "coco/train/_annotations.coco.json"
    write_coco(tmp_path / "coco/train", file, SCENES)
    expected = opened(tmp_path / "yolo").fingerprint(), opened(tmp_path / "coco").fingerprint()
    for text in [*(tmp_path / "yolo/train/labels").glob("*.txt"), file]:
        text.write_bytes(b"\xef\xbb\xbf" + text.read_bytes().replace(b"\n", b"\r\n"))
    found = opened(tmp_path / "yolo").fingerprint(), opened(tmp_path / "coco").fingerprint()
    assert found == expected


@pytest.mark.parametrize(
    ("make", "said"), [(os.mkdir, "Is a directory"), (os.mkfifo, "is a pipe or device")]
)
def test_labels_that_are_no_file_are_no_picture_without_boxes(tmp_path, make, said):
    layout_yolo(tmp_path, "train", SCENES)
    file = tmp_path / "train/labels/000.txt"
    file.unlink()
    make(file)
    with pytest.raises(DataError, match=rf"{file}: .*{said}"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 0.95 0.5 0.25 0.25", "reaches out of its picture"),
        ("0 0.5 0.5 0 0.25", "has no area"),
        ("0 0.5 0.5 -0.1 0.25", "has no area"),
        ("3 0.5 0.5 0.1 0.1", "class 3 is unknown, 3 classes are known: zero, one, two"),
        ("0 0.5 0.5 0.1", "is not a class number and x, y, width, height"),
        ("zero 0.5 0.5 0.1 0.1", "is not a class number"),
        ("0 nan 0.5 0.1 0.1", "not finite"),
        ("0 0.1 0.1 nan 0.2 0.3 0.3", "not finite"),
    ],
)
def test_a_wrong_line_of_yolos_is_named(tmp_path, line, said):
    layout_yolo(tmp_path, "train", SCENES)
    file = tmp_path / "train/labels/000.txt"
    file.write_text(f"0 0.5 0.5 0.25 0.25\n{line}\n")
    with pytest.raises(DataError) as error:
        opened(tmp_path)
    assert f"{file}: line 2" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no data.yaml with the names of the classes"),
        ("nc: 4\nnames: [zero, one, two]\n", "nc is 4, but there are 3 names: the background"),
        ("names: [one, one]\n", "names must be a list of different names"),
        ("names: [yes, no, maybe]\n", "names must be a list of different names"),
        ("names: [[zero], [one], [two]]\n", "names must be a list of different names"),
        ("names: {\n", "data.yaml: cannot be read as YAML"),
        ("path: .\n", "names must be a list of different names"),
    ],
)
def test_wrong_names_of_yolos_are_named(tmp_path, text, said):
    layout_yolo(tmp_path, "train", SCENES)
    if text is None:
        (tmp_path / "data.yaml").unlink()
    else:
        (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(DataError) as error:
        opened(tmp_path)
    assert said in str(error.value)


def test_a_pipe_among_annotations_is_named(tmp_path):
    layout_beside(tmp_path, "train", SCENES)
    (file,) = (tmp_path / "train").glob("*.json")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DataError, match="is a pipe or device"):
        opened(tmp_path)


def test_two_pictures_of_one_label_file_are_refused(tmp_path):
    layout_yolo(tmp_path, "train", SCENES)
    picture = next((tmp_path / "train/images").glob("*.png"))
    picture.with_suffix(".jpg").write_bytes(picture.read_bytes())
    with pytest.raises(DataError, match="two pictures of one name"):
        opened(tmp_path)


def test_what_is_not_one_data_set_is_refused(tmp_path):
    with pytest.raises(DataError, match="no training set in COCO's or YOLO's layout"):
        opened(tmp_path)
    layout_beside(tmp_path, "train", SCENES)
    with pytest.raises(DataError, match=r"num_classes is 4, but .* has 3 classes.* background"):
        opened(tmp_path, num_classes=4)
    (tmp_path / "train/more.json").write_text(json.dumps(coco(SCENES)))
    with pytest.raises(DataError, match=r"more than one set of annotations: .*coco.*more"):
        opened(tmp_path)


def test_a_stand_in_has_no_boxes(tmp_path):
    layout_beside(tmp_path, "train", SCENES)

    image, target = opened(tmp_path, "train").stand_in()

    assert image.shape == (3, 64, 64)
    assert target["boxes"].shape == (0, 4)


def test_a_picture_of_another_size_than_its_annotations_say(tmp_path):
    file, content = content_of(tmp_path)
    content["images"][0].update(width=48, height=64)
    others = [box for box in content["annotations"] if box["image_id"] != 1]
    content["annotations"] = others
    file.write_text(json.dumps(content))

    with pytest.raises(DataError, match=r"000\.png has 64 x 48 pixels.* 48 x 64"):
        opened(tmp_path)[0]


def test_boxes_that_are_wrong_can_be_left_out(tmp_path, caplog):
    file, content = content_of(tmp_path)
    content["annotations"][0]["bbox"] = [60, 0, 16, 16]  # in part
    content["annotations"][1]["bbox"] = [70, 0, 16, 16]
    content["annotations"][2]["bbox"] = [5, 5, 0, 3]
    file.write_text(json.dumps(content))

    train = opened(tmp_path, invalid_boxes="drop")

    kept = []
    for index in range(6):
        _, target = train[index]
        kept += target["boxes"].tolist()
    assert len(kept) == len(content["annotations"]) - 2
    assert kept[0] == [60, 0, 64, 16]
    assert "left out 2 invalid boxes" in caplog.text


def test_a_pixel_beyond_the_edge_is_rounding(tmp_path):
    file, content = content_of(tmp_path)
    content["annotations"][0]["bbox"] = [-0.5, 0, 16, 48.9]
    file.write_text(json.dumps(content))

    _, target = opened(tmp_path)[0]

    assert np.allclose(target["boxes"][0], [0, 0, 15.5, 48])


def test_scenes_of_digits_have_boxes_around_their_ink():
    scenes = DigitBoxes("val", scenes=40, sides=(12, 20))

    assert len(scenes) == 40
    counts = set()
    for index in range(len(scenes)):
        image, target = scenes[index]
        outside = image.clone()
        for left, top, right, bottom in target["boxes"].int().tolist():
            inside = image[:, top:bottom, left:right]
            assert inside.amax((0, 1)).min() > 0.1  # each column, and each row, has ink
            assert inside.amax((0, 2)).min() > 0.1
            outside[:, top:bottom, left:right] = 0
        assert outside.max() < 0.13
        counts.add(len(target["boxes"]))
    assert counts == {1, 2, 3}


def test_scenes_of_digits_have_the_fingerprint_of_what_they_are_made_with():
    found = DigitBoxes("val", scenes=40, sides=(12, 20)).fingerprint()

    again = DigitBoxes("val", scenes=40, sides=(12, 20))
    other = DigitBoxes("val", scenes=40, split_seed=1)
    assert found == again.fingerprint()
    assert found != other.fingerprint()


def test_scenes_of_digits_for_an_evaluation_have_what_it_needs():
    of_evaluation = {"size", "frame", "iscrowd"}

    _, val = DigitBoxes("val", scenes=1)[0]
    _, train = DigitBoxes("train", scenes=1)[0]

    assert of_evaluation <= val.keys()
    assert of_evaluation.isdisjoint(train.keys())


def test_scenes_of_digits_that_cannot_be_made_are_refused():
    with pytest.raises(DataError, match=r"data.sides=\[30, 20\]"):
        DigitBoxes("val", sides=(30, 20))
    with pytest.raises(DataError, match=r"data.scenes=0: give at least 1"):
        DigitBoxes("val", scenes=0)


def test_categories_and_pictures_of_coco_keep_the_numbers_of_their_file(tmp_path):
    layout_beside(tmp_path, "train", SCENES)
    layout_beside(tmp_path, "val", SCENES)

    val = detection_folder(str(tmp_path), "val", 64)
    turned = detection_folder(str(tmp_path), "val", 64, classes=CLASSES[::-1])

    assert val.category_ids == [10, 20, 30]
    assert [val.number(index) for index in range(3)] == [1, 2, 3]
    assert turned.category_ids == [30, 20, 10]
    more = detection_folder(str(tmp_path), "val", 64, classes=["three", *CLASSES])
    assert more.category_ids == [31, 10, 20, 30]  # that of a class without any is a free one


def test_categories_and_pictures_of_yolo_are_counted(tmp_path):
    layout_yolo(tmp_path, "val", SCENES)
    layout_yolo(tmp_path, "train", SCENES)

    val = detection_folder(str(tmp_path), "val", 64)

    assert val.category_ids == [0, 1, 2]
    assert val.number(2) == 2


class Known(torch.nn.Module):
    """A detector that answers with what it is given."""

    def __init__(self, target):
        super().__init__()
        self.answer = {
            "boxes": target["boxes"].as_subclass(torch.Tensor),
            "labels": target["labels"].as_subclass(torch.Tensor),
        }

    def forward(self, images):
        return [self.answer]


def test_the_frame_leads_back_to_the_picture_through_a_transform(tmp_path):
    layout_beside(tmp_path, "train", SCENES)
    layout_beside(tmp_path, "val", SCENES)
    resized = v2.Compose([v2.Resize((30, 90)), v2.Pad([3, 5, 0, 2])])
    plain = detection_folder(str(tmp_path), "val", 64)
    moved = detection_folder(str(tmp_path), "val", 64, transform=lambda pair: resized(*pair))

    for index in range(len(SCENES)):
        _, expected = plain[index]
        _, target = moved[index]
        batch = collate_boxes([moved[index]])

        (found,) = Detection.prediction_step(None, Known(target), batch)

        torch.testing.assert_close(found["boxes"], boxes_of(index), rtol=0, atol=1e-3)
        assert expected["size"].tolist() == target["size"].tolist() == [48, 64]
