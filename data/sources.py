"""Image data sets by name: embedded, and downloaded through torchvision."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.errors import DataError, reason
from data.images import ImageTensors, Transform, resized
from data.splits import cut, train_and_val
from data.updates import Indices

Split = Literal["train", "val", "test"]
Shares = Callable[[npt.ArrayLike], tuple[Indices, Indices]]  # from targets to train and val


class Digits(ImageTensors):
    """scikit-learn's 1,797 handwritten digits (8 x 8, 10 classes), in the package: no download.

    The split is stratified and fixed by `split_seed`: 1,257 train, 270 val, 270 test. With `folds`
    val is fold number `fold` of the 1,527 that are not test.
    """

    concurrent = True  # nothing is prepared: processes may open it at once

    def __init__(
        self,
        split: Split,
        image_size: int = 16,
        split_seed: int = 0,
        transform: Transform | None = None,
        fold: int | None = None,
        folds: int | None = None,
    ) -> None:
        images, targets = _digits()
        rest, test = cut(targets, 270, split_seed)
        train, val = train_and_val(targets[rest], 270, split_seed, fold, folds)
        rows = {"train": rest[train], "val": rest[val], "test": test}[_known(split)]
        pixels = np.round(images[rows] * (255 / 16)).astype(np.uint8)
        super().__init__(
            resized(torch.from_numpy(pixels).view(-1, 1, 8, 8), image_size),
            torch.from_numpy(targets[rows]).long(),
            [str(digit) for digit in range(10)],
            transform,
        )


def _digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the pixels (1797, 64) and labels that `sklearn.datasets.load_digits` returns.

    They are read from its file: importing scikit-learn takes about half as long as torch.
    """
    package = find_spec("sklearn")
    folders = package.submodule_search_locations if package is not None else None
    file = Path(folders[0] if folders else "", "datasets", "data", "digits.csv.gz")
    if not file.is_file():  # another version keeps it elsewhere
        from sklearn.datasets import load_digits

        images, targets = load_digits(return_X_y=True)
        return images, targets
    rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)


class Cifar10(ImageTensors):
    """CIFAR-10 through torchvision: 60,000 colour images of 32 x 32, 10 classes.

    `val` is cut from the 50,000 training images, `val_size` of them, stratified by `split_seed`;
    or it is fold number `fold` of `folds`.
    """

    concurrent = True  # a lock lets one process of a machine download

    def __init__(
        self,
        root: str,
        split: Split,
        image_size: int | None = None,
        val_size: int = 5000,
        split_seed: int = 0,
        download: bool = True,
        transform: Transform | None = None,
        fold: int | None = None,
        folds: int | None = None,
    ) -> None:
        from torchvision.datasets import CIFAR10

        shares = partial(train_and_val, val_size=val_size, seed=split_seed, fold=fold, folds=folds)
        images, targets, classes = _torchvision(CIFAR10, root, split, shares, download)
        super().__init__(
            resized(images.permute(0, 3, 1, 2).contiguous(), image_size),
            targets,
            classes,
            transform,
        )


class FashionMnist(ImageTensors):
    """Fashion-MNIST through torchvision: 70,000 grey images of 28 x 28, 10 classes.

    `val` is cut from the 60,000 training images, `val_size` of them, stratified by `split_seed`;
    or it is fold number `fold` of `folds`.
    """

    concurrent = True  # a lock lets one process of a machine download

    def __init__(
        self,
        root: str,
        split: Split,
        image_size: int | None = None,
        val_size: int = 6000,
        split_seed: int = 0,
        download: bool = True,
        transform: Transform | None = None,
        fold: int | None = None,
        folds: int | None = None,
    ) -> None:
        from torchvision.datasets import FashionMNIST

        shares = partial(train_and_val, val_size=val_size, seed=split_seed, fold=fold, folds=folds)
        images, targets, classes = _torchvision(FashionMNIST, root, split, shares, download)
        super().__init__(resized(images[:, None], image_size), targets, classes, transform)


def _known(split: str) -> str:
    if split not in ("train", "val", "test"):
        raise DataError(f"split is {split!r}, not one of train, val, test")
    return split


def _torchvision(
    kind: Any, root: str, split: Split, shares: Shares, download: bool
) -> tuple[Tensor, Tensor, list[str]]:
    """Return images as torchvision keeps them, targets and class names of one split."""
    _known(split)
    root = str(Path(root).expanduser())
    with locked(Path(root)) if download else nullcontext():
        source = _opened(kind, root, split != "test", download)
    images = torch.as_tensor(source.data)
    targets = torch.as_tensor(source.targets).long()
    if split != "test":
        rows = _train_or_val(targets, split, shares)
        images, targets = images[rows], targets[rows]
    return images, targets, [str(name) for name in source.classes]


def _train_or_val(targets: Tensor, split: Split, shares: Shares) -> Tensor:
    train, val = shares(targets.numpy())
    if split == "val" and len(val) == 0:
        raise DataError("val_size=0 leaves no validation images: raise it or set data.val=null")
    return torch.from_numpy(train if split == "train" else val)


def _opened(kind: Any, root: str, train: bool, download: bool) -> Any:
    try:
        return kind(root, train=train, download=download)
    except Exception as error:
        way_out = (
            "check the network, or put torchvision's files there by hand"
            if download
            else "set download=true or point data.root to the files"
        )
        raise DataError(
            f"{kind.__name__} is not usable in data.root={root} ({reason(error)}): {way_out}"
        ) from error


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Let one process of a machine download at a time; the others find the files there.

    A folder that cannot be written needs no lock: nothing can be downloaded into it.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".lock").open("w")
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
