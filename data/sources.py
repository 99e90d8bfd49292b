"""Data sets by name: embedded in installed packages, or downloaded through torchvision."""

import fcntl
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from regimen.data.errors import DataError, reason
from regimen.data.keys import Indices
from regimen.data.splits import Split, stratified_split, train_and_val
from regimen.data.transforms import Transform, acts_on_batches

logger = logging.getLogger(__name__)
# Types whose values a fingerprint hashes. It hashes no others by value, since reading them may load
# or compute anything.
_PLAIN = (str, bytes, int, float, complex, np.generic, type(None), PurePath)
_BLOCK = 1 << 24  # bytes that are hashed at a time
Interrupted = Callable[[], bool]  # called repeatedly during a wait: whether to give up


@dataclass(eq=False, repr=False)
class TensorSamples:
    """Samples in memory, a row each of inputs and targets; inputs alone if `targets` is None.

    Whole batches are taken at once, unless the transform takes single samples.
    """

    transforms_in_batches = True

    inputs: Tensor
    targets: Tensor | None
    transform: Transform = None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        inputs = self.inputs[index]
        if self.transform is not None:
            inputs = self.transform(inputs)
        if self.targets is None:
            return inputs
        target = self.targets[index]
        is_class = target.ndim == 0 and not target.is_floating_point()
        return inputs, int(target) if is_class else target

    def input_form(self) -> dict[str, Any]:
        """Return the form of an input before the transforms."""
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
        inputs = self.inputs.index_select(0, rows)  # for bytes many times as fast as inputs[rows]
        if self.transform is not None:
            inputs = self.transform(inputs)
        return inputs if self.targets is None else (inputs, self.targets.index_select(0, rows))


class ImageTensors(TensorSamples):
    """Images (n, C, H, W) and class numbers (n,) in memory."""

    targets: Tensor

    def __init__(
        self, images: Tensor, targets: Tensor, classes: Iterable[str], transform: Transform = None
    ) -> None:
        super().__init__(images, targets, transform)
        self.classes = list(classes)


def resize_images(images: Tensor, size: int | Sequence[int] | None) -> Tensor:
    """Return uint8 images (n, C, H, W) at `size` (a side, or height and width), bilinear.

    None leaves them as they are. Data sets in memory do it once, not at every access.
    """
    if size is None:
        return images
    shape = [size, size] if isinstance(size, int) else list(size)
    if list(images.shape[-2:]) == shape:
        return images
    if min(shape) < 1:
        raise DataError(f"image_size={size}: give a side of at least one pixel")
    chunks = []
    for chunk in torch.split(images, 1024):  # all as floats would take four times the memory
        values = interpolate(chunk.float(), shape, mode="bilinear", antialias=True)
        chunks.append(values.round().clamp(0, 255).byte())
    return torch.cat(chunks)


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
        rest, test = stratified_split(targets, 270, split_seed)
        train, val = train_and_val(targets[rest], 270, split_seed, fold, folds)
        rows = {"train": rest[train], "val": rest[val], "test": test}[split]
        pixels = np.round(images[rows] * (255 / 16)).astype(np.uint8)  # their white is 16
        images = resize_images(torch.from_numpy(pixels).view(-1, 1, 8, 8), image_size)
        super().__init__(images, torch.from_numpy(targets[rows]), map(str, range(10)), transform)


def _digits() -> tuple[Any, Indices]:
    """Return the pixels (1797, 64) and labels that `sklearn.datasets.load_digits` returns.

    They are read from its file: importing scikit-learn takes about half as long as torch.
    """
    package = Path(find_spec("sklearn").origin)  # type: ignore[union-attr,arg-type]
    rows = np.loadtxt(package.with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)


class _Downloaded(ImageTensors):
    """Images of a data set of torchvision; `val` is cut from the training images.

    It has `val_size` of them (None: a tenth), stratified and drawn with `split_seed`; with `folds`
    it is fold number `fold`.
    """

    concurrent = True  # a lock lets one process of a machine download
    torchvision_name: str  # the class in torchvision.datasets

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
        folder = Path(root).expanduser()
        source = _torchvision(self.torchvision_name, folder, split != "test", download)
        images = torch.as_tensor(source.data)
        targets = torch.as_tensor(source.targets).long()
        if split != "test":
            if val_size is None:
                val_size = len(targets) // 10
            train, val = train_and_val(targets.numpy(), val_size, split_seed, fold, folds)
            if split == "val" and len(val) == 0:
                raise DataError("val_size=0 leaves no images: raise it or set data.val=null")
            rows = torch.from_numpy(train if split == "train" else val)
            images = images[rows]
            targets = targets[rows]
        # (n, H, W, C) of colour images, (n, H, W) of grey ones, to (n, C, H, W).
        images = images.permute(0, 3, 1, 2).contiguous() if images.ndim == 4 else images[:, None]
        super().__init__(
            resize_images(images, image_size), targets, map(str, source.classes), transform
        )


class Cifar10(_Downloaded):
    """CIFAR-10 through torchvision: 60,000 colour images of 32 x 32, 10 classes.

    `val` is cut from the 50,000 training images: 5,000 of them, or `val_size`.
    """

    torchvision_name = "CIFAR10"


class FashionMnist(_Downloaded):
    """Fashion-MNIST through torchvision: 70,000 grey images of 28 x 28, 10 classes.

    `val` is cut from the 60,000 training images: 6,000 of them, or `val_size`.
    """

    torchvision_name = "FashionMNIST"


def _torchvision(name: str, root: Path, train: bool, download: bool) -> Any:
    """Return a data set of torchvision; raises DataError if it cannot be read or downloaded."""
    from torchvision import datasets

    with ExitStack() as stack:
        if download:
            # One process of a machine downloads; the others wait, and then find the files. Without
            # a folder that can be written there is no lock, and torchvision's own error follows.
            with suppress(OSError):
                root.mkdir(parents=True, exist_ok=True)
                stack.enter_context(file_lock(root / ".lock"))
        try:
            return getattr(datasets, name)(str(root), train=train, download=download)
        except Exception as error:
            raise DataError(
                f"{name} is not usable in data.root={root} ({reason(error)}): "
                "put the files there by hand, or download them: data.download=true"
            ) from error


@contextmanager
def file_lock(path: Path, interrupted: Interrupted = lambda: False) -> Iterator[None]:
    """Hold a lock file; a process that waits for it polls it, and asks `interrupted`.

    Raises InterruptedError, and other OSErrors.
    """
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

    Arrays, tensors and lists in memory are hashed whole. Files are represented by their names, a
    mapped file by its ends, a wrapped data set by its length: none of them is read. A data set may
    have a method `fingerprint()` of its own.
    """
    name = type(dataset).__name__
    own_method = getattr(dataset, "fingerprint", None)
    if callable(own_method):
        try:
            return str(own_method())
        except Exception as error:
            logger.warning("warning: %s.fingerprint() failed: %s", name, reason(error))
    digest = hashlib.sha256(f"{name} {_length(dataset)}".encode())
    attributes = getattr(dataset, "__dict__", {})
    for attribute in ("classes", "targets", "inputs", "images", "names"):
        value = attributes.get(attribute)
        if value is None:
            continue
        digest.update(attribute.encode())
        try:
            _add(digest, value)
        except Exception:  # a user's own types may raise anything
            digest.update(type(value).__name__.encode())
    return digest.hexdigest()[:16]


def digest_of(*parts: str | NDArray[Any]) -> str:
    """Return a digest of texts and arrays, in their order, as methods `fingerprint` return it."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part.tobytes())
    return digest.hexdigest()[:16]


def _length(value: Any) -> int | str:
    try:
        return len(value)
    except Exception:
        return "of unknown length"


def _add(digest: Any, value: Any) -> None:
    """Add an attribute's value to a digest."""
    if isinstance(value, Tensor):
        _add_tensor(digest, value.detach())
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            # Such an array holds addresses, so the objects are added instead. It is on the host:
            # nothing waits for a device.
            _add(digest, value.tolist())
        else:
            _add_array(digest, value)
    elif isinstance(value, Mapping):
        _add(digest, list(value.items()))
    elif isinstance(value, list | tuple):
        _add_items(digest, value)
    elif isinstance(value, (range, *_PLAIN)):
        _add_plain(digest, value)
    else:  # it may be a data set that reads whatever it is asked for
        digest.update(f"{type(value).__name__} {_length(value)}".encode())


def _add_items(digest: Any, items: Sequence[Any]) -> None:
    if _are_plain(items):
        _add_plain_items(digest, items)
        return
    # Lists of lists of equal length are an array, too.
    if all(isinstance(item, list | tuple) for item in items):
        same_length = len({len(item) for item in items}) == 1
        if same_length and all(_are_plain(item) for item in items):
            _add_plain(digest, items)
            return
    digest.update(f"{type(items).__name__} {len(items)}".encode())
    for item in items:
        _add(digest, item)


def _are_plain(items: Sequence[Any]) -> bool:
    return all(isinstance(item, _PLAIN) for item in items)


def _add_plain_items(digest: Any, items: Sequence[Any]) -> None:
    # As an array if it is not too large: an array of texts has room for the longest at each place.
    longest = max((len(item) for item in items if isinstance(item, str | bytes)), default=0)
    if longest * len(items) < _BLOCK:
        _add_plain(digest, list(items))
    else:
        digest.update(repr(list(items)).encode())


def _add_plain(digest: Any, value: Any) -> None:
    """Add plain values as an array; as text where that array would hold their addresses."""
    array = np.asarray(value)
    if array.dtype.hasobject:  # of paths, and of None
        digest.update(repr(value).encode())
    else:
        _add_array(digest, array)


def _add_tensor(digest: Any, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        return
    # The host waits for the device that holds the tensor: once, before the training.
    tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    try:
        array = tensor.numpy()
    except TypeError:  # numpy lacks some formats, such as bfloat16
        array = tensor.reshape(-1).view(torch.uint8).numpy()
    _add_array(digest, array)


def _add_array(digest: Any, array: NDArray[Any]) -> None:
    digest.update(f"{array.dtype} {array.shape}".encode())
    flat = array.reshape(-1)
    block = max(1, _BLOCK // max(1, array.itemsize))  # in elements
    starts = range(0, len(flat), block)
    if isinstance(array, np.memmap) and len(starts) > 2:
        starts = range(0, len(flat), len(flat) - block)  # its beginning and its end
    for start in starts:
        digest.update(flat[start : start + block].tobytes())
