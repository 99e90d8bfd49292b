"""Image data sets by name: embedded, and downloaded through torchvision."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from data.errors import DataError, reason
from data.images import ImageTensors, Transform, resized
from data.splits import cut, train_and_val

Split = Literal["train", "val", "test"]


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


class _Downloaded(ImageTensors):
    """Images of a class of torchvision's, of which `val` is cut from the training images.

    `val_size` of them (None: a tenth), stratified by `split_seed`; or fold number `fold` of
    `folds`.
    """

    concurrent = True  # a lock lets one process of a machine download
    kind: str  # the class in torchvision.datasets

    def __init__(
        self,
        root: str,
        split: Split,
        image_size: int | None = None,
        val_size: int | None = None,
        split_seed: int = 0,
        download: bool = True,
        transform: Transform | None = None,
        fold: int | None = None,
        folds: int | None = None,
    ) -> None:
        source = _torchvision(self.kind, root, _known(split) != "test", download)
        images, targets = torch.as_tensor(source.data), torch.as_tensor(source.targets).long()
        if split != "test":
            size = len(targets) // 10 if val_size is None else val_size
            train, val = train_and_val(targets.numpy(), size, split_seed, fold, folds)
            if split == "val" and len(val) == 0:
                message = "val_size=0 leaves no validation images: raise it or set data.val=null"
                raise DataError(message)
            rows = torch.from_numpy(train if split == "train" else val)
            images, targets = images[rows], targets[rows]
        images = images.permute(0, 3, 1, 2).contiguous() if images.ndim == 4 else images[:, None]
        classes = [str(name) for name in source.classes]
        super().__init__(resized(images, image_size), targets, classes, transform)


class Cifar10(_Downloaded):
    """CIFAR-10 through torchvision: 60,000 colour images of 32 x 32, 10 classes.

    `val` is cut from the 50,000 training images: 5,000 of them, or `val_size`.
    """

    kind = "CIFAR10"


class FashionMnist(_Downloaded):
    """Fashion-MNIST through torchvision: 70,000 grey images of 28 x 28, 10 classes.

    `val` is cut from the 60,000 training images: 6,000 of them, or `val_size`.
    """

    kind = "FashionMNIST"


def _known(split: str) -> str:
    if split not in ("train", "val", "test"):
        raise DataError(f"split is {split!r}, not one of train, val, test")
    return split


def _torchvision(name: str, root: str, train: bool, download: bool) -> Any:
    """Return a data set of torchvision's; raises DataError where it cannot be had."""
    from torchvision import datasets

    root = str(Path(root).expanduser())
    with locked(Path(root)) if download else nullcontext():
        try:
            return getattr(datasets, name)(root, train=train, download=download)
        except Exception as error:
            way_out = (
                "check the network, or put torchvision's files there by hand"
                if download
                else "set download=true or point data.root to the files"
            )
            raise DataError(
                f"{name} is not usable in data.root={root} ({reason(error)}): {way_out}"
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
