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
from torch import Tensor

from regimen.conf.addresses import check_protocol, is_address
from regimen.conf.errors import problems_at
from regimen.conf.json_text import plain_json
from regimen.data.decode import Channels, Range, decode_image
from regimen.data.errors import DataError, explained, reason
from regimen.data.image_folder import EXTENSIONS, Pictures
from regimen.data.splits import NAMES, Split, class_names, is_cut, rows_of_train
from regimen.data.transforms import Transform

logger = logging.getLogger(__name__)
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
_LAYOUT = 2  # version of the index files
# An index is an array with an entry for each sample: the number of its shard, where its image lies
# there and how many bytes it has, the image's name, and the label as text.
_LONGEST = 1000  # letters of a label, and of a member's name
_LARGEST = 1_000_000  # bytes of a member with a label
_ENTRY = ("shard", "offset", "size", "name", "label")


class TarShards(Pictures):
    """Images and classes in tar files, read by position: only the samples that are asked for.

    root: a folder, or any URL that fsspec opens. paths: the shards, as the index counts them.
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
        self._root, self._paths, self._index, self.classes = root, paths, index, classes
        numbers = {name.encode(): number for number, name in enumerate(classes)}
        for row, label in enumerate(index["label"]):
            if label not in numbers:
                found = f"{self.path(row)}: class {label.decode()!r}"
                raise DataError(f"{found} is not among those of train")
        self.targets = torch.tensor([numbers[label] for label in index["label"]])

    def path(self, index: int) -> str:
        """Return the shard of a sample and its name there."""
        return f"{self._paths[self._index['shard'][index]]}:{super().path(index)}"

    def read(self, index: int) -> Tensor:
        """Return a picture as uint8 (C, H, W). Raises DataError."""
        content = self.content(index)
        return decode_image(content, self.path(index), self.channels, self.value_range)

    def content(self, index: int) -> bytes:
        """Return the bytes of a picture. Raises DataError."""
        shard, start, size, *_ = self._index[index].tolist()
        content: bytes
        # fsspec's file systems raise what their libraries do.
        with explained(f"cannot read {self.path(index)}", Exception):
            if is_address(self._root):
                files = _opened(self._root)[0]
                content = files.cat_file(self._paths[shard], start=start, end=start + size)
            else:
                content = os.pread(_descriptor(self._paths[shard]), size, start)
        if len(content) != size:
            raise DataError(f"{self.path(index)}: the shard is shorter than when it was indexed")
        return content


@cache  # of this process; reading by position, others may share it
def _descriptor(path: str) -> int:
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
    train = _shards(root, "train")
    if not train:
        raise DataError(f"data.root={root} holds no shards: expected train*.tar or train/*.tar")
    place = Path(cache_dir).expanduser() if cache_dir else None
    if place is None and not is_address(root):
        place = Path(root) / ".index"
    index = _indexed(root, train, label, place, keep_index)
    labels, numbers = np.unique(index["label"], return_inverse=True)
    names = {name.decode() for name in labels}
    classes = class_names(names, num_classes, len(numbers), f"data.root={root}")
    paths = train
    if is_cut(split, bool(_shards(root, "val")), val_fraction, folds):
        rows = rows_of_train(split, numbers, val_fraction, split_seed, fold, folds)
        index = index[rows]
    elif split != "train":
        if not (paths := _shards(root, split)):
            lacking = "data.root=%s has no shards for %s: the run goes without it"
            logger.warning(lacking, root, split)
            return None
        index = _indexed(root, paths, label, place, keep_index)
    return TarShards(root, paths, index, classes, channels, transform, value_range)


def _opened(root: str) -> tuple[Any, str]:
    """Return the file system of a root, and the root's place in it."""
    # By itself: fsspec takes a folder `a::b` for a chain of addresses.
    return url_to_fs(root) if is_address(root) else (LocalFileSystem(), make_path_posix(root))


def _shards(root: str, split: str) -> list[str]:
    """Return the paths of a split's shards, sorted."""
    with explained(f"data.root={root} cannot be listed", Exception):  # as above
        files, place = _opened(root)
        for name in NAMES[split]:
            found = [*files.glob(f"{place}/{name}*.tar"), *files.glob(f"{place}/{name}/*.tar")]
            others = [*files.glob(f"{place}/{name}*.t*"), *files.glob(f"{place}/{name}/*.t*")]
            if found or others:
                break
    packed = sorted(str(path) for path in others if str(path).lower().endswith(_PACKED))
    if packed:
        raise DataError(
            f"data.root={root}: {packed[0]} is a compressed tar file, whose samples have no "
            "positions: unpack it to .tar, as gunzip does"
        )
    return sorted(map(str, found))


def _indexed(root: str, paths: list[str], label: str, place: Path | None, keep: bool) -> Any:
    """Return the index of shards, each from its file in `place` if it is there."""
    parts = [_shard_index(root, path, label, place, keep) for path in paths]
    for number, part in enumerate(parts):
        part["shard"] = number
    return np.concatenate(parts)


def _shard_index(root: str, path: str, label: str, place: Path | None, keep: bool) -> Any:
    files = _opened(root)[0]
    facts = files.info(path)
    if facts["type"] != "file":  # to open a pipe would wait for ever
        raise DataError(f"{path}: is a folder, pipe or device, not a shard")
    known = f"{_LAYOUT} {path} {facts['size']} {facts.get('mtime') or files.ukey(path)} {label}"
    kept = None if place is None else place / f"{sha256(known.encode()).hexdigest()[:24]}.npy"
    if kept is not None and kept.is_file():
        try:
            return _checked(np.load(kept, allow_pickle=False))
        except (OSError, ValueError, EOFError, TypeError, OverflowError, MemoryError) as error:
            logger.warning("%s is damaged and made again: %s", kept, reason(error))
    logger.info("indexing %s", path)
    with (  # the headers and labels are read once, from the beginning to the end
        explained(f"{path}: not an uncompressed tar file, or cut off", tarfile.TarError),
        files.open(path, "rb") as file,
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        members = (member for member in archive if member.isfile())
        samples = groupby(members, key=lambda member: _split_name(member)[0])
        rows = [_sample(path, archive, name, inside, label) for name, inside in samples]
    if not rows:
        raise DataError(f"{path}: the shard holds no samples")
    index = np.rec.fromrecords(rows, names=_ENTRY)  # type: ignore[call-overload]
    if kept is None or not keep:
        return index
    try:  # what cannot be written is made again by the next run
        kept.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=kept.parent, suffix=".part", delete=False) as part:
            np.save(part, index)
        os.replace(part.name, kept)
    except OSError as error:
        logger.warning("cannot keep the index %s (%s): set data.cache_dir", kept, error.strerror)
    return index


def _checked(index: Any) -> Any:
    """Return a kept index. Raises ValueError for one of another form."""
    names = getattr(getattr(index, "dtype", None), "names", None)
    if names != _ENTRY or index.ndim != 1 or not len(index):
        raise ValueError("it is no index of a shard")
    kinds = [index.dtype[name].kind for name in _ENTRY]
    if kinds[:3] != ["i"] * 3 or kinds[3:] != ["S"] * 2:
        raise ValueError("it is no index of a shard")
    if min(index["offset"].min(), index["size"].min()) < 0:
        raise ValueError("it has negative places")
    return index


def _split_name(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return the name of a member's sample, and its ending: all from the first dot on."""
    folder, base = os.path.split(member.name)
    stem, dot, ending = base.partition(".")
    return os.path.join(folder, stem), (dot + ending).lower()


def _label(content: bytes, field: str) -> str:
    """Return the label in a member; with `field` it is JSON. Raises what reading it raises."""
    if not field:
        return content.decode().strip()
    value = plain_json(content)[field]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{field} is neither a name nor a number but {type(value).__name__}")
    label = str(value)
    label.encode()  # of a lone surrogate there is no name
    return label


def _sample(
    path: str, archive: tarfile.TarFile, name: str, members: Iterable[tarfile.TarInfo], label: str
) -> tuple[Any, ...]:
    """Return a sample's entry in the index, the number of the shard being 0."""
    suffix, _, field = label.partition(".")
    image: tuple[Any, ...] = ()
    value = None
    endings = list[str]()
    for member in members:
        ending = _split_name(member)[1]
        endings.append(ending)
        if len(member.name) > _LONGEST:  # an index has room for the longest name in every row
            raise DataError(f"{path}: {member.name[:80]!r}... is longer than {_LONGEST} letters")
        if ending in EXTENSIONS:
            image = 0, member.offset_data, member.size, os.fsencode(member.name)
        elif ending == f".{suffix}":
            if member.size > _LARGEST:
                raise DataError(f"{path}:{member.name}: {member.size} bytes are no label")
            content = archive.extractfile(member).read()  # type: ignore[union-attr]
            place = f"{path}:{member.name}: no label in it"
            with explained(place, ValueError, KeyError, TypeError):
                value = _label(content, field)
            if not value:
                raise DataError(f"{path}:{member.name}: the label is empty")
            if len(value) > _LONGEST:
                raise DataError(f"{path}:{member.name}: the label has more than {_LONGEST} letters")
    if not image or value is None:
        lacks = f".{suffix}" if image else "image"
        dots = " (a sample's name ends at its first dot: rename files with further ones)"
        told = dots if any(ending.count(".") > 1 for ending in endings) else ""
        raise DataError(f"{path}: sample {name!r} has no {lacks}, only {', '.join(endings)}{told}")
    return (*image, value.encode())
