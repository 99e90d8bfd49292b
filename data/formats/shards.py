"""Tar shards in WebDataset's layout, with an index that gives random access to their samples."""

import logging
import os
import tarfile
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem, make_path_posix

from regimen.conf.addresses import check_protocol, is_address
from regimen.conf.errors import problems_at
from regimen.conf.json_text import plain_json
from regimen.data.decode import Channels, Range
from regimen.data.errors import DataError, as_data_error, reason
from regimen.data.image_folder import EXTENSIONS, Pictures
from regimen.data.splits import NAMES, Split, class_names, is_part_of_train, rows_of_train
from regimen.data.transforms import Transform

logger = logging.getLogger(__name__)
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
_INDEX_VERSION = 2
_MAX_NAME = 1000  # letters of a label, and of a member's name
_MAX_LABEL_BYTES = 1_000_000  # of a member with a label
# An index is an array with an entry for each sample: the number of its shard, the position of its
# image there and its size in bytes, the image's name, and the label as text.
_ENTRY = ("shard", "offset", "size", "name", "label")


class TarShards(Pictures):
    """Images and classes in tar files, read by position: only the samples that are needed.

    root: a folder, or any URL that fsspec opens. paths: the shards, in the order of the index.
    """

    def __init__(
        self,
        root: str,
        paths: list[str],
        index: Any,
        classes: list[str],
        channels: Channels,
        transform: Transform,
        value_range: Range = None,
    ) -> None:
        super().__init__(index["name"], channels, None, transform, value_range=value_range)
        self._root = root
        self._paths = paths
        self._index = index
        self.classes = classes
        numbers = {name.encode(): number for number, name in enumerate(classes)}
        for row, label in enumerate(index["label"]):
            if label not in numbers:
                raise DataError(
                    f"{self.path(row)}: class {label.decode()!r} is not among those of train"
                )
        self.targets = torch.tensor([numbers[label] for label in index["label"]])

    def path(self, index: int) -> str:
        """Return the shard of a sample and its name there."""
        return f"{self._paths[self._index['shard'][index]]}:{super().path(index)}"

    def content(self, index: int) -> bytes:
        """Return the bytes of a picture. Raises DataError."""
        shard, start, size, *_ = self._index[index].tolist()
        path = self._paths[shard]
        content: bytes
        # fsspec's file systems raise what their libraries do.
        with as_data_error(f"cannot read {self.path(index)}", Exception):
            if is_address(self._root):
                files, _ = _file_system(self._root)
                content = files.cat_file(path, start=start, end=start + size)
            else:
                content = os.pread(_open_shard(path), size, start)
        if len(content) != size:
            raise DataError(f"{self.path(index)}: the shard is shorter than when it was indexed")
        return content


@cache
def _open_shard(path: str) -> int:
    # Forked workers share the descriptor. `pread` has no position that they could disturb.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def tar_shards(
    root: str,
    split: Split,
    label: str = "cls",
    val_fraction: float = 0.1,
    split_seed: int = 0,
    channels: Channels = 3,
    cache_dir: str | None = None,
    transform: Transform = None,
    fold: int = 0,
    folds: int = 0,
    keep_index: bool = True,
    num_classes: int | None = None,
    value_range: Range = None,
) -> TarShards | None:
    """Open one split of `root`: the shards `<split>*.tar` or `<split>/*.tar`.

    A sample is the files of one name up to its first dot: an image, and its class (a number or a
    name) in `.cls`, or in the field FIELD of `.json` with `label=json.FIELD`. The index of each
    shard is kept in `cache_dir` (default: `.index` in a local root). Without shards for `val`,
    `val_fraction` of train is taken, stratified; with `folds`, fold number `fold` of train.
    Without `keep_index` no index is written. None if there is no such split. Raises DataError.
    """
    if is_address(root):
        with problems_at("data.root"):
            check_protocol(root, trusted=True)
    else:
        root = str(Path(root).expanduser())
    paths = _shards(root, "train")
    if not paths:
        raise DataError(f"data.root={root} holds no shards: expected train*.tar or train/*.tar")
    index_dir = Path(cache_dir).expanduser() if cache_dir else None
    if index_dir is None and not is_address(root):
        index_dir = Path(root) / ".index"
    index = _load_index(root, paths, label, index_dir, keep_index)
    labels, numbers = np.unique(index["label"], return_inverse=True)
    names = {name.decode() for name in labels}
    classes = class_names(names, num_classes, len(numbers), f"data.root={root}")

    if is_part_of_train(split, bool(_shards(root, "val")), val_fraction, folds):
        rows = rows_of_train(split, numbers, val_fraction, split_seed, fold, folds)
        index = index[rows]
    elif split != "train":
        paths = _shards(root, split)
        if not paths:
            logger.warning(
                "data.root=%s has no shards for %s: the run goes without it", root, split
            )
            return None
        index = _load_index(root, paths, label, index_dir, keep_index)
    return TarShards(root, paths, index, classes, channels, transform, value_range)


def _file_system(root: str) -> tuple[Any, str]:
    """Return the file system of a root, and the root's path in it."""
    if is_address(root):
        files, path = url_to_fs(root)
        return files, path
    # Not by `url_to_fs`, which takes a folder `a::b` for a chain of addresses.
    return LocalFileSystem(), make_path_posix(root)


def _shards(root: str, split: str) -> list[str]:
    """Return the paths of a split's shards, sorted. Raises DataError for compressed ones."""
    shards = list[str]()
    compressed = list[str]()
    # fsspec's file systems raise what their libraries do.
    with as_data_error(f"data.root={root} cannot be listed", Exception):
        files, folder = _file_system(root)
        for name in NAMES[split]:
            shards = [*files.glob(f"{folder}/{name}*.tar"), *files.glob(f"{folder}/{name}/*.tar")]
            others = [*files.glob(f"{folder}/{name}*.t*"), *files.glob(f"{folder}/{name}/*.t*")]
            compressed = [path for path in others if path.lower().endswith(_COMPRESSED)]
            if shards or compressed:  # not a file beside them, such as val/notes.txt
                break
    if compressed:
        raise DataError(
            f"data.root={root}: {min(compressed)} is a compressed tar file, whose samples have no "
            "positions: unpack it to .tar, as gunzip does"
        )
    return sorted(shards)


def _load_index(root: str, paths: list[str], label: str, index_dir: Path | None, keep: bool) -> Any:
    """Return the index of shards; each is read from its file in `index_dir`, or made."""
    parts = [_shard_index(root, path, label, index_dir, keep) for path in paths]
    for number, part in enumerate(parts):
        part["shard"] = number
    return np.concatenate(parts)


def _shard_index(root: str, path: str, label: str, index_dir: Path | None, keep: bool) -> Any:
    files, _ = _file_system(root)
    info = files.info(path)
    if info["type"] != "file":  # to open a pipe would wait for ever
        raise DataError(f"{path}: is a folder, pipe or device, not a shard")
    file = None
    if index_dir is not None:
        modified = info.get("mtime") or files.ukey(path)
        identity = f"{_INDEX_VERSION} {path} {info['size']} {modified} {label}"
        file = index_dir / f"{sha256(identity.encode()).hexdigest()[:24]}.npy"
    if file is not None and file.is_file():
        try:
            return _checked(np.load(file, allow_pickle=False))
        except (OSError, ValueError, EOFError, TypeError, OverflowError, MemoryError) as error:
            logger.warning("%s is damaged and made again: %s", file, reason(error))
    index = _make_index(files, path, label)
    if file is not None and keep:
        _save_index(file, index)
    return index


def _make_index(files: Any, path: str, label: str) -> Any:
    """Read the headers and labels of a shard once, from the beginning to the end."""
    logger.info("indexing %s", path)
    with (
        as_data_error(f"{path}: not an uncompressed tar file, or cut off", tarfile.TarError),
        files.open(path, "rb") as file,
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        members = (member for member in archive if member.isfile())
        samples = groupby(members, key=lambda member: _split_name(member)[0])
        rows = [_sample_entry(path, archive, name, group, label) for name, group in samples]
    if not rows:
        raise DataError(f"{path}: the shard holds no samples")
    return np.rec.fromrecords(rows, names=_ENTRY)  # type: ignore[call-overload]


def _save_index(file: Path, index: Any) -> None:
    """Write an index; if that fails, warn: the next run makes it again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
            np.save(part, index)
        os.replace(part.name, file)
    except OSError as error:
        logger.warning("cannot keep the index %s (%s): set data.cache_dir", file, error.strerror)


def _checked(index: Any) -> Any:
    """Return an index that was read from a file. Raises ValueError for one of another form."""
    dtype: Any = getattr(index, "dtype", np.dtype(object))
    if dtype.names != _ENTRY or index.ndim != 1 or len(index) == 0:
        raise ValueError("it is no index of a shard")
    if "".join(dtype[name].kind for name in _ENTRY) != "iiiSS":
        raise ValueError("it is no index of a shard")
    if index["offset"].min() < 0 or index["size"].min() < 0:
        raise ValueError("it has negative places")
    return index


def _split_name(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return the name of a member's sample, and its ending: all from the first dot on."""
    folder, base = os.path.split(member.name)
    stem, dot, ending = base.partition(".")
    return os.path.join(folder, stem), (dot + ending).lower()


def _parse_label(content: bytes, field: str) -> str:
    """Return the label in a member; with `field` it is JSON. Raises what reading it raises."""
    if not field:
        return content.decode().strip()
    value = plain_json(content)[field]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{field} is neither a name nor a number but {type(value).__name__}")
    label = str(value)
    label.encode()  # raises ValueError for a lone surrogate, which no name can hold
    return label


def _sample_entry(
    path: str, archive: tarfile.TarFile, name: str, members: Iterable[tarfile.TarInfo], label: str
) -> tuple[Any, ...]:
    """Return a sample's entry in the index, with 0 as the number of the shard."""
    suffix, _, field = label.partition(".")
    image: tuple[Any, ...] | None = None
    text: str | None = None
    endings = list[str]()
    for member in members:
        _, ending = _split_name(member)
        endings.append(ending)
        if len(member.name) > _MAX_NAME:  # an index has room for the longest name in every row
            raise DataError(f"{path}: {member.name[:80]!r}... is longer than {_MAX_NAME} letters")
        if ending in EXTENSIONS:
            image = (0, member.offset_data, member.size, os.fsencode(member.name))
        elif ending == f".{suffix}":
            text = _read_label(path, archive, member, field)
    if image is not None and text is not None:
        return (*image, text.encode())
    missing = "image" if image is None else f".{suffix}"
    hint = ""
    if any(ending.count(".") > 1 for ending in endings):
        hint = " (a sample's name ends at its first dot: rename files with further ones)"
    raise DataError(f"{path}: sample {name!r} has no {missing}, only {', '.join(endings)}{hint}")


def _read_label(path: str, archive: tarfile.TarFile, member: tarfile.TarInfo, field: str) -> str:
    place = f"{path}:{member.name}"
    if member.size > _MAX_LABEL_BYTES:
        raise DataError(f"{place}: {member.size} bytes are no label")
    content = archive.extractfile(member).read()  # type: ignore[union-attr]
    with as_data_error(f"{place}: no label in it", ValueError, KeyError, TypeError):
        label = _parse_label(content, field)
    if not label:
        raise DataError(f"{place}: the label is empty")
    if len(label) > _MAX_NAME:
        raise DataError(f"{place}: the label has more than {_MAX_NAME} letters")
    return label
