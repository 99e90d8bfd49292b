"""Tar shards in WebDataset's layout, with an index that gives random access to their samples."""

import json
import logging
import os
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from fsspec.core import url_to_fs

from data.decode import decode_image
from data.errors import DataError, reason
from data.formats.columns import class_names
from data.image_folder import EXTENSIONS
from data.images import Transform
from data.sources import Split
from data.splits import rows_of_train

logger = logging.getLogger(__name__)
_LAYOUT = 1  # version of the index files
_PARTS = ("offsets", "sizes", "names", "labels")  # of an index file
# Arrays with an entry for each sample: the number of its shard, where its image lies there and how
# many bytes it has, the image's name, and the label as text.
ShardIndex = dict[str, npt.NDArray[Any]]


class TarShards:
    """Images and classes in tar files, read by position: only the samples that are asked for.

    root: a folder, or any URL that fsspec opens. paths: the shards, as the index counts them.
    """

    transforms_in_batches = True

    def __init__(
        self,
        root: str,
        paths: list[str],
        index: ShardIndex,
        classes: list[str],
        channels: int = 3,
        transform: Transform | None = None,
    ) -> None:
        self._root, self._paths, self._index = root, paths, index
        self.names = index["names"]
        numbers = {name.encode(): number for number, name in enumerate(classes)}
        for row, label in enumerate(index["labels"]):
            if label not in numbers:
                found = f"{self.path(row)}: class {label.decode()!r}"
                raise DataError(f"{found} is not among those of train")
        targets = [numbers[label] for label in index["labels"]]
        self.targets = torch.tensor(targets, dtype=torch.int64)
        self.classes = classes
        self.channels = channels
        self.transform = transform
        self._files: dict[int, int] = {}  # descriptors of this process, by shard

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """Return the shard of a sample and its name there."""
        shard = self._paths[int(self._index["shards"][index])]
        return f"{shard}:{os.fsdecode(self.names[index])}"

    def input_form(self) -> dict[str, Any]:
        """Return the form of pictures before the transforms: any size."""
        return {"kind": "picture", "channels": self.channels, "size": None}

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = decode_image(self._content(index), self.path(index), self.channels)
        image = image if self.transform is None else self.transform(image)
        return image, int(self.targets[index])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": {}}  # a worker opens the shards itself

    def _content(self, index: int) -> bytes:
        shard, offset, size = (
            int(self._index[name][index]) for name in ("shards", "offsets", "sizes")
        )
        try:
            content = self._read(shard, offset, size)
        except Exception as error:  # fsspec's file systems raise what their libraries do
            raise DataError(f"cannot read {self.path(index)}: {reason(error)}") from error
        if len(content) != size:
            raise DataError(f"{self.path(index)}: the shard is shorter than when it was indexed")
        return content

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        path = self._paths[shard]
        if "://" in self._root:
            content: bytes = url_to_fs(self._root)[0].cat_file(
                path, start=offset, end=offset + size
            )
            return content
        if shard not in self._files:
            self._files[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._files[shard], size, offset)


def tar_shards(
    root: str,
    split: Split,
    label: str = "cls",
    val_fraction: float = 0.1,
    split_seed: int = 0,
    channels: int = 3,
    cache_dir: str | None = None,
    transform: Transform | None = None,
    fold: int | None = None,
    folds: int | None = None,
    keep_index: bool = True,
    num_classes: int | None = None,
) -> TarShards | None:
    """Open one split of `root`: the shards `<split>*.tar` or `<split>/*.tar`.

    A sample is the files of one name up to its first dot: an image, and its class (a number or a
    name) in `.cls`, or in the field FIELD of `.json` with `label=json.FIELD`. The index of each
    shard is kept in `cache_dir` (default: `.index` in a local root). Without shards for `val`,
    `val_fraction` of train is taken, stratified; with `folds`, fold number `fold` of train.
    Without `keep_index` no index is written. None if there is no such split. Raises DataError.
    """
    root = root if "://" in root else str(Path(root).expanduser())
    train = _shards(root, "train")
    if not train:
        raise DataError(f"data.root={root} holds no shards: expected train*.tar or train/*.tar")
    place = Path(cache_dir).expanduser() if cache_dir else None
    if place is None and "://" not in root:
        place = Path(root) / ".index"
    index = _indexed(root, train, label, place, keep_index)
    names = {label.decode() for label in np.unique(index["labels"])}
    classes = class_names(names, num_classes, len(index["labels"]), f"data.root={root}")
    in_folds = folds is not None and split != "test"
    own = train if split == "train" or in_folds else _shards(root, split)
    cuts = in_folds or (split != "test" and val_fraction > 0 and not _shards(root, "val"))
    if not own and not cuts:
        logger.warning("data.root=%s has no shards for %s: the run goes without it", root, split)
        return None
    if own and split != "train" and not in_folds:
        index = _indexed(root, own, label, place, keep_index)
    elif cuts:
        numbers = np.unique(index["labels"], return_inverse=True)[1]
        rows = rows_of_train(split, numbers, val_fraction, split_seed, fold, folds)
        index = {name: part[rows] for name, part in index.items()}
    return TarShards(root, own or train, index, classes, channels, transform)


def _shards(root: str, split: str) -> list[str]:
    """Return the paths of a split's shards, sorted."""
    try:
        files, place = url_to_fs(root)
        found = [*files.glob(f"{place}/{split}*.tar"), *files.glob(f"{place}/{split}/*.tar")]
    except Exception as error:  # fsspec's file systems raise what their libraries do
        raise DataError(f"data.root={root} cannot be listed: {reason(error)}") from error
    return sorted(map(str, found))


def _indexed(root: str, paths: list[str], label: str, place: Path | None, keep: bool) -> ShardIndex:
    """Return the index of shards, each from its file in `place` if it is there."""
    parts = [_shard_index(root, path, label, place, keep) for path in paths]
    for number, part in enumerate(parts):
        part["shards"] = np.full(len(part["offsets"]), number)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _shard_index(root: str, path: str, label: str, place: Path | None, keep: bool) -> ShardIndex:
    files = url_to_fs(root)[0]
    facts = files.info(path)
    known = f"{_LAYOUT} {path} {facts['size']} {facts.get('mtime') or files.ukey(path)} {label}"
    kept = None if place is None else place / f"{sha256(known.encode()).hexdigest()[:24]}.npz"
    if kept is not None and kept.is_file():
        try:
            with np.load(kept, allow_pickle=False) as found:
                return {name: found[name] for name in _PARTS}
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            logger.warning("%s is damaged and made again: %s", kept, reason(error))
    logger.info("indexing %s", path)
    with files.open(path, "rb") as file:
        index = _scan(path, file, label)
    if kept is not None and keep:
        _keep(kept, index)
    return index


def _keep(path: Path, index: ShardIndex) -> None:
    """Write an index file; one that cannot be written is made again by the next run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            np.savez(file, **index)  # type: ignore[arg-type]
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("cannot keep the index %s (%s): set data.cache_dir", path, error.strerror)


def _scan(path: str, file: Any, label: str) -> ShardIndex:
    """Read the headers and labels of a shard, once, from its beginning to its end."""
    found: list[tuple[int, int, bytes, bytes]] = []
    for name, sample in _samples(path, file, label):
        if len(sample) < 2:
            lacks = "image" if "image" not in sample else f".{label.partition('.')[0]}"
            raise DataError(f"{path}: sample {name!r} has no {lacks}")
        found.append((*sample["image"], sample["label"]))
    if not found:
        raise DataError(f"{path}: the shard holds no samples")
    kinds = (np.int64, np.int64, np.bytes_, np.bytes_)
    columns = zip(_PARTS, zip(*found, strict=True), kinds, strict=True)
    return {name: np.array(values, dtype=kind) for name, values, kind in columns}


def _samples(path: str, file: Any, label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the samples of a tar file in order: neighbours of one name up to the first dot."""
    suffix, _, field = label.partition(".")
    name, sample = "", dict[str, Any]()
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                folder, base = os.path.split(member.name)
                stem, _, ending = base.partition(".")
                if (here := os.path.join(folder, stem)) != name:
                    if sample:
                        yield name, sample
                    name, sample = here, {}
                ending = ending.lower()
                if f".{ending}" in EXTENSIONS:
                    place = member.offset_data, member.size, os.fsencode(member.name)
                    sample["image"] = place
                elif ending == suffix:
                    content = archive.extractfile(member)
                    assert content is not None  # a file
                    sample["label"] = _label(f"{path}:{member.name}", content.read(), field)
    except tarfile.TarError as error:
        raise DataError(f"{path}: not an uncompressed tar file, or cut off: {error}") from error
    if sample:
        yield name, sample


def _label(place: str, content: bytes, field: str) -> bytes:
    try:
        value = json.loads(content)[field] if field else content.decode().strip()
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{place}: no label in it: {reason(error)}") from error
    if not str(value):
        raise DataError(f"{place}: the label is empty")
    return str(value).encode()
