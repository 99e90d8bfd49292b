"""Name what a pickle would import, by reading its instructions and running none of them."""

import _compat_pickle
import io
import pickletools
import sys
import warnings
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
# Modules of the standard library whose classes (large initial) and types named here are data.
_DATA_MODULES = {"argparse", "collections", "datetime", "decimal", "enum", "fractions", "pathlib"}
_DATA_MODULES |= {"typing", "uuid", "zoneinfo"}
_DATA_TYPES = {"array", "date", "datetime", "defaultdict", "deque", "time", "timedelta", "timezone"}
_DATA_BUILTINS = {"dict", "frozenset", "list", "object", "range", "slice", "tuple", "type"}
_NUMPY_DATA = {"_frombuffer", "_reconstruct", "bool", "bool_", "dtype", "ndarray", "scalar"}
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING"}
_LARGEST = 1 << 28


def foreign_names(path: Path) -> list[str]:
    """List what the pickles of `path` import beyond tensors and plain data, in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pickletools remarks on odd escapes
        names = dict.fromkeys(name for content in _pickles(path) for name in _imported(content))
    return [name for name in names if not _is_plain(name)]


def is_code(name: str) -> bool:
    """Say whether an imported name is something to call rather than a kind of data.

    Functions are written small and classes large by convention; in the standard library, where a
    class may well run a command, only a few modules hold data, and the rest counts as code.
    """
    module, _, attribute = name.rpartition(".")
    root = module.partition(".")[0]
    like_class = attribute.lstrip("_")[:1].isupper()
    if root == "builtins":
        return attribute not in _DATA_BUILTINS and not attribute.endswith(("Error", "Exception"))
    if root == "numpy":
        return not (attribute in _NUMPY_DATA or attribute[-1:].isdigit() or attribute[:2] == "__")
    if root in sys.stdlib_module_names or root in ("posix", "nt"):
        return root not in _DATA_MODULES or not (like_class or attribute in _DATA_TYPES)
    return not like_class


def _is_plain(name: str) -> bool:
    is_type = name.startswith("torch.") and name.count(".") == 1
    storage_or_dtype = is_type and (name.endswith("Storage") or name[6:].isalnum())
    return name in _PLAIN or name.startswith(_PLAIN_PREFIXES) or storage_or_dtype


def _pickles(path: Path) -> list[bytes]:
    """Return the pickles of an archive, or else the file as one; never raises for its content."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [
                archive.read(info)
                for info in archive.infolist()
                if info.filename.endswith(".pkl") and info.file_size < _LARGEST
            ]
    except Exception:  # zipfile raises some ten types for a damaged archive
        with open(path, "rb") as file:
            return [file.read(_LARGEST)]


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
            yield _modern(*str(argument).split(" ", 1))
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


def _modern(module: str, name: str) -> str:
    """Translate a name of Python 2, which pickles up to protocol 2 use, as unpickling does."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"
