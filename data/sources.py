"""Data sets by name: embedded in installed packages, or downloaded through torchvision."""

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from regimen.data.errors import DataError, reason
from regimen.data.keys import Indices
from regimen.data.splits import Split, cut, train_and_val
from regimen.data.transforms import Transform, acts_on_batches

logger = logging.getLogger(__name__)
# What a fingerprint takes as it is: of other types it cannot know what reading them means.
_PLAIN = (str, bytes, int, float, complex, np.generic, type(None), os.PathLike)
_BLOCK = 1 << 24  # bytes that a fingerprint looks at together
Interrupted = Callable[[], bool]  # asked again and again while something is awaited


@dataclass(eq=False, repr=False)
class TensorSamples:
    """Samples in memory, a row each of inputs and targets; inputs alone where these are None.

    Whole batches are taken at once, unless the transform has to see each sample by itself.
    """

    transforms_in_batches = True

    inputs: Tensor
    targets: Tensor | None
    transform: Transform = None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        inputs = self.inputs[index]
        inputs = inputs if self.transform is None else self.transform(inputs)
        if self.targets is None:
            return inputs
        number = self.targets.ndim == 1 and not self.targets.is_floating_point()
        return inputs, int(self.targets[index]) if number else self.targets[index]

    def input_form(self) -> dict[str, Any]:
        """Return the form that the transforms expect of a picture."""
        shape = list(self.inputs.shape[1:])
        if self.inputs.dtype != torch.uint8 or len(shape) != 3 or shape[0] not in (1, 3):
            return {"kind": "array"}
        return {"kind": "picture", "channels": shape[0], "size": shape[1:]}

    def tensors(self) -> Any:
        """Return all samples as one batch, before the transforms."""
        return self.inputs if self.targets is None else (self.inputs, self.targets)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a whole batch at once, or None if the transform takes single samples."""
        if not acts_on_batches(self.transform):
            return None
        rows = torch.from_numpy(np.array(indices))  # a quarter of the time of torch.tensor
        inputs = self.inputs.index_select(0, rows)  # of bytes, many times as fast as inputs[rows]
        inputs = inputs if self.transform is None else self.transform(inputs)
        return inputs if self.targets is None else (inputs, self.targets.index_select(0, rows))


class ImageTensors(TensorSamples):
    """Images (n, C, H, W) and class numbers (n,) in memory."""

    targets: Tensor

    def __init__(
        self, images: Tensor, targets: Tensor, classes: Sequence[str], transform: Transform = None
    ) -> None:
        super().__init__(images, targets, transform)
        self.classes = list(classes)


def resized(images: Tensor, size: int | Sequence[int] | None) -> Tensor:
    """Return uint8 images (n, C, H, W) at `size` (a side, or height and width), bilinear.

    Data sets in memory do it once, not at every access.
    """
    shape = [size, size] if isinstance(size, int) else size
    if shape is None or list(images.shape[-2:]) == list(shape):
        return images
    if min(shape) < 1:
        raise DataError(f"image_size={size}: give a side of at least one pixel")
    chunks = [
        interpolate(chunk.float(), list(shape), mode="bilinear", antialias=True)
        for chunk in torch.split(images, 1024)
    ]
    return torch.cat([chunk.round().clamp(0, 255).byte() for chunk in chunks])


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
        transform: Transform = None,
        fold: int = 0,
        folds: int = 0,
    ) -> None:
        images, targets = _digits()
        rest, test = cut(targets, 270, split_seed)
        train, val = train_and_val(targets[rest], 270, split_seed, fold, folds)
        rows = {"train": rest[train], "val": rest[val], "test": test}[split]
        pixels = np.round(images[rows] * (255 / 16)).astype(np.uint8)
        images = resized(torch.from_numpy(pixels).view(-1, 1, 8, 8), image_size)
        classes = [str(digit) for digit in range(10)]
        super().__init__(images, torch.from_numpy(targets[rows]), classes, transform)


def _digits() -> tuple[Any, Indices]:
    """Return the pixels (1797, 64) and labels that `sklearn.datasets.load_digits` returns.

    They are read from its file: importing scikit-learn takes about half as long as torch.
    """
    package = Path(find_spec("sklearn").origin)  # type: ignore[union-attr,arg-type]
    rows = np.loadtxt(package.with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
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
        transform: Transform = None,
        fold: int = 0,
        folds: int = 0,
    ) -> None:
        source = _torchvision(self.kind, Path(root).expanduser(), split != "test", download)
        images, targets = torch.as_tensor(source.data), torch.as_tensor(source.targets).long()
        if split != "test":
            size = len(targets) // 10 if val_size is None else val_size
            train, val = train_and_val(targets.numpy(), size, split_seed, fold, folds)
            if split == "val" and len(val) == 0:
                raise DataError("val_size=0 leaves no images: raise it or set data.val=null")
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


def _torchvision(name: str, root: Path, train: bool, download: bool) -> Any:
    """Return a data set of torchvision's; raises DataError where it cannot be had."""
    from torchvision import datasets

    with ExitStack() as stack:
        if download:  # by one process of a machine at a time; the others find the files there
            with suppress(OSError):  # nothing can be downloaded into such a folder
                root.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(root / ".lock"))
        try:
            return getattr(datasets, name)(str(root), train=train, download=download)
        except Exception as error:
            why = f"{name} is not usable in data.root={root} ({reason(error)})"
            way_out = "put the files there by hand, or download them: data.download=true"
            raise DataError(f"{why}: {way_out}") from error


@contextmanager
def locked(path: Path, interrupted: Interrupted = lambda: False) -> Iterator[None]:
    """Hold a lock file; waiting processes poll it. Raises InterruptedError, and other OSErrors."""
    with path.open("w") as lock:
        while True:
            if interrupted():
                raise InterruptedError
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield


def fingerprint(dataset: Any) -> str:
    """Return a digest of a data set: size, classes, targets, and images or paths. Never raises.

    Arrays, tensors and lists in memory are hashed whole; of files, the names; of what would have to
    be read (a mapped file, a wrapped data set) the ends or the length. A data set may have a method
    `fingerprint()` of its own.
    """
    name = type(dataset).__name__
    own = getattr(dataset, "fingerprint", None)
    if callable(own):
        try:
            return str(own())
        except Exception as error:
            logger.warning("warning: %s.fingerprint() failed: %s", name, reason(error))
    digest = hashlib.sha256(f"{name} {_length(dataset)}".encode())
    known = getattr(dataset, "__dict__", {})
    for attribute in ("classes", "targets", "inputs", "images", "names"):
        if (value := known.get(attribute)) is not None:
            digest.update(attribute.encode())
            try:
                _add(digest, value)
            except Exception:  # of a user's own types, which may raise anything
                digest.update(type(value).__name__.encode())
    return digest.hexdigest()[:16]


def _length(value: Any) -> int | str:
    try:
        return len(value)
    except Exception:
        return "of unknown length"


def _add(digest: Any, value: Any) -> None:
    """Add what an attribute of a data set holds to a digest."""
    if isinstance(value, Tensor):
        _add_tensor(digest, value.detach())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        _add_array(digest, value)
    elif isinstance(value, np.ndarray):
        _add(digest, value.tolist())
    elif isinstance(value, Mapping):
        _add(digest, list(value.items()))
    elif isinstance(value, list | tuple):
        _add_items(digest, value)
    elif isinstance(value, (range, *_PLAIN)):
        _add_array(digest, np.asarray(value))
    else:  # it may be a data set that reads whatever it is asked for
        digest.update(f"{type(value).__name__} {_length(value)}".encode())


def _add_items(digest: Any, items: Sequence[Any]) -> None:
    if not all(isinstance(item, _PLAIN) for item in items):
        # Lists of lists of one length are an array, too; others are taken item by item.
        nested = all(isinstance(item, list | tuple) for item in items)
        if nested and len({len(item) for item in items}) == 1:
            every = [part for item in items for part in item]
            if all(isinstance(part, _PLAIN) for part in every):
                _add_array(digest, np.asarray(items))
                return
        digest.update(f"{type(items).__name__} {len(items)}".encode())
        for item in items:
            _add(digest, item)
        return
    longest = max((len(item) for item in items if isinstance(item, str | bytes)), default=0)
    plain = None
    # An array has room for the longest text at each place.
    if longest * len(items) < _BLOCK:
        plain = np.asarray(items)
    if plain is None or plain.dtype.hasobject:
        digest.update(repr(list(items)).encode())
    else:
        _add_array(digest, plain)


def _add_tensor(digest: Any, tensor: Tensor) -> None:
    numbers = None
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta:
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        try:
            numbers = tensor.numpy()
        except TypeError:  # numpy lacks some formats, such as bfloat16
            numbers = tensor.reshape(-1).view(torch.uint8).numpy()
    if numbers is None:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    else:
        _add_array(digest, numbers)


def _add_array(digest: Any, array: NDArray[Any]) -> None:
    digest.update(f"{array.dtype} {array.shape}".encode())
    flat = array.reshape(-1)
    at_once = max(1, _BLOCK // max(1, array.itemsize))
    parts = range(0, len(flat), at_once)
    if isinstance(array, np.memmap) and len(parts) > 2:
        parts = range(0, len(flat), len(flat) - at_once)  # its beginning and its end
    for first in parts:
        digest.update(flat[first : first + at_once].tobytes())
