"""Name what a pickle would import, by reading its instructions and running none of them."""

import io
import pickletools
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

# What torch.save writes for tensors and plain data, all of it accepted by a weights-only load.
_PLAIN = {
    "collections.OrderedDict",
    "collections.Counter",
    "_codecs.encode",
    "builtins.set",
    "builtins.bytearray",
    "builtins.complex",
    "torch.Size",
    "torch.device",
    "torch.dtype",
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
}
_PLAIN_PREFIXES = ("torch._utils._rebuild", "torch._tensor._rebuild", "torch.storage.")
_DATA_MODULES = {
    "array",
    "collections",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "pathlib",
    "types",
    "uuid",
    "zoneinfo",
}
_DATA_BUILTINS = {"frozenset", "slice", "range", "list", "dict", "tuple", "object", "type"}
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING"}
_LARGEST = 1 << 28


def foreign_names(path: Path) -> list[str]:
    """List what the pickles of `path` import beyond tensors and plain data, in order."""
    names = dict.fromkeys(name for content in _pickles(path) for name in _imported(content))
    return [name for name in names if not _is_plain(name)]


def is_code(name: str) -> bool:
    """Say whether an imported name is something to call rather than a kind of data.

    Functions are written small and classes large by convention; in the standard library only a
    few modules hold data types, and the rest counts as code whatever its spelling.
    """
    module, _, attribute = name.rpartition(".")
    root = module.partition(".")[0]
    if root in ("builtins", "__builtin__"):
        return attribute not in _DATA_BUILTINS and not attribute.endswith(("Error", "Exception"))
    if root in sys.stdlib_module_names or root in ("posix", "nt"):
        return root not in _DATA_MODULES
    if root == "numpy":
        return not module.endswith(("multiarray", "numeric", "numpy", "random._pickle"))
    return not attribute.lstrip("_")[:1].isupper()


def _is_plain(name: str) -> bool:
    is_type = name.startswith("torch.") and name.count(".") == 1
    storage_or_dtype = is_type and (name.endswith("Storage") or name[6:].isalnum())
    return name in _PLAIN or name.startswith(_PLAIN_PREFIXES) or storage_or_dtype


def _pickles(path: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.filename.endswith(".pkl") and info.file_size < _LARGEST:
                    yield archive.read(info)
            if any(
                "/code/" in name or name.endswith("constants.pkl") for name in archive.namelist()
            ):
                yield b"ctorch.jit\nload\n."  # TorchScript keeps its code beside the pickles
    except zipfile.BadZipFile:
        with open(path, "rb") as file:
            yield file.read(_LARGEST)


def _imported(content: bytes) -> Iterator[str]:
    """Yield the names that a stream of one or several pickles imports, as far as it can be read."""
    stream = io.BytesIO(content)
    while stream.tell() < len(content):
        start = stream.tell()
        try:
            yield from _imported_by_one(stream)
        except Exception:  # no pickle, or none from here on: pickletools raises what it likes
            return
        if stream.tell() == start:
            return


def _imported_by_one(stream: io.BytesIO) -> Iterator[str]:
    strings: list[str] = []
    memo: dict[int, str] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", ".")
        elif name == "STACK_GLOBAL":
            yield ".".join(strings[-2:])
        elif name in _STRINGS:
            strings.append(str(argument))
        elif name == "MEMOIZE":
            memo[len(memo)] = strings[-1] if strings else ""
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(str(argument))] = strings[-1] if strings else ""
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            strings.append(memo.get(int(str(argument)), ""))
