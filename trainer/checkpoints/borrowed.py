"""Frozen weights that a checkpoint leaves out, and reads again from the files that they come from.

Whoever reads weights of a module from files says so by `mark_as_read`. A checkpoint then has, under
the key `borrowed`, folder and sha256 of these files instead of the parameters that stay frozen.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regimen.conf.errors import ConfigError
from regimen.conf.interpolation import leaves
from regimen.conf.json_text import form_fault
from regimen.trainer.checkpoints.archive import digest
from regimen.trainer.errors import CheckpointError

KEY = "borrowed"  # of a checkpoint
_ATTRIBUTE = "weights_read_from"  # of a module: a list of sources, the last of which was read last
_FORM: Mapping[str, Any] = {
    **dict.fromkeys(("key", "name", "folder", "sha256"), str),
    "files": dict,
    "parameters": list,
}
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class WeightsSource:
    """Files that parameters of a module were read from."""

    key: str  # of the configuration, which names them: model.name, model.weights
    name: str  # what it says: a folder, a file, a name on the hub
    files: Sequence[Path]  # in one folder
    parameters: set[str]  # names within the module
    by_default: bool = False  # whether checkpoints leave them out where nobody says otherwise
    stamps: dict[str, list[int]] = field(init=False)  # size and time of each file, when it was read
    _sha256: str | None = None

    def __post_init__(self) -> None:
        self.stamps = self._current_stamps()

    @property
    def folder(self) -> Path:
        """The folder of the files, absolute."""
        return self.files[0].absolute().parent

    def is_unchanged(self) -> bool:
        """Return whether the files are those that were read, by size and time."""
        try:
            return self._current_stamps() == self.stamps
        except OSError:
            return False

    def sha256(self) -> str:
        """Return the sha256 of the file; of several that of the lines that `sha256sum` writes.

        Reads the files, once in a process: some seconds for a gigabyte.
        """
        if self._sha256 is None and len(self.files) == 1:
            self._sha256 = digest(self.files[0])
        elif self._sha256 is None:
            whole = hashlib.sha256()
            for path in sorted(self.files):
                whole.update(f"{digest(path)}  {path.name}\n".encode())
            self._sha256 = whole.hexdigest()
        return self._sha256

    def sha256_beside(self, entry: Mapping[str, Any]) -> str:
        """Return the sha256; that of a checkpoint's entry if size and time are those in it.

        So a resume does not read gigabytes only to compare them.
        """
        if self._sha256 is None and self.stamps == entry["files"]:
            self._sha256 = entry["sha256"]
        return self.sha256()

    def _current_stamps(self) -> dict[str, list[int]]:
        stamps = {}
        for path in self.files:
            status = path.stat()
            stamps[path.name] = [status.st_size, status.st_mtime_ns]
        return stamps


def mark_as_read(
    module: nn.Module, parameters: set[str], files: Sequence[Path], key: str, name: str
) -> None:
    """Say that these parameters of a module have the values of files, which `key`=`name` named.

    Without files, or where one of them is not there, nothing can be read again.
    """
    if parameters and files and all(path.is_file() for path in files):
        vars(module).setdefault(_ATTRIBUTE, []).append(WeightsSource(key, name, files, parameters))


def lend_by_default(module: nn.Module, former: Mapping[str, nn.Parameter]) -> None:
    """Let checkpoints leave out what the module has read, unless a run says otherwise.

    `former`: the parameters by the names that they had when they were read.
    """
    for source in vars(module).get(_ATTRIBUTE, ()):
        # By identity: adapters have given the parameters other names.
        read = {id(former[name]) for name in source.parameters}
        source.parameters = set()
        # Tied weights under each of their names, as in a state dict.
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in read:
                source.parameters.add(name)
        source.by_default = True


def sources_of(modules: Mapping[str, nn.Module]) -> dict[WeightsSource, set[str]]:
    """Return the sources of modules, and the names of what was read from them, with prefixes.

    `modules`: by prefix. Of several readings of a parameter the last one counts.
    """
    found = dict[WeightsSource, set[str]]()
    seen = set[str]()
    for prefix, root in modules.items():
        for path, module in root.named_modules():  # the outer ones first, which read later
            start = f"{prefix}{path}." if path else prefix
            for source in reversed(vars(module).get(_ATTRIBUTE, [])):
                names = {start + name for name in source.parameters} - seen
                seen |= names
                found[source] = names
    return found


class BorrowedWeights:
    """What the checkpoints of a run leave out.

    These are parameters that were read from files and have been frozen since the run began. One
    that was trained is saved from then on, frozen again or not.

    `modules`: those whose states a checkpoint holds, by the prefix of their names in it.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._names = sources_of(modules)  # of parameters, by what they were read from
        self._eligible = set[str]().union(*self._names.values())  # what may be left out
        self._constant = dict[str, nn.Parameter]()  # of these, frozen since `watch` began
        self._is_watching = False

    def __bool__(self) -> bool:
        """Return whether anything was read from files."""
        return bool(self._names)

    def watch(self) -> None:
        """Forget what trains by now; called between two updates, the first call begins."""
        if not self._is_watching:
            self._is_watching = True
            for name, parameter in self._parameters().items():
                if name in self._eligible:
                    self._constant[name] = parameter
        trained = [name for name, tensor in self._constant.items() if tensor.requires_grad]
        for name in trained:
            del self._constant[name]

    def _parameters(self) -> dict[str, nn.Parameter]:
        parameters = {}
        for prefix, root in self._modules.items():
            # Under FSDP this puts shards in the place of what is gathered.
            for name, value in root.state_dict(keep_vars=True).items():
                if isinstance(value, nn.Parameter):
                    parameters[prefix + name] = value
        return parameters

    def names(self, borrow: bool | None) -> dict[str, WeightsSource]:
        """Return the parameters that a checkpoint leaves out now, with their sources.

        `borrow`: all that can be, or none; None: those of modules that lend by default.
        """
        self.watch()
        current = self._parameters()
        for name, parameter in list(self._constant.items()):
            # A parameter that took the place of another has other values.
            if current.get(name) is not parameter:
                del self._constant[name]
        chosen = dict[str, WeightsSource]()
        for source, names in self._names.items():
            constant = names & self._constant.keys()
            wanted = source.by_default if borrow is None else borrow
            if not wanted or not constant:
                continue
            if source.is_unchanged():
                chosen |= dict.fromkeys(sorted(constant), source)
            else:
                for name in constant:
                    del self._constant[name]
                _log.warning(
                    "%s changed since the run read its weights: checkpoints hold all of them from "
                    "here on",
                    source.folder,
                )
        return chosen

    def continue_from(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Leave out no more than the checkpoint did that the run goes on from."""
        self._eligible &= _parameters_of(entries)
        # The next `watch` begins anew.
        self._constant = {}
        self._is_watching = False

    def check(self, entries: Sequence[Mapping[str, Any]], where: str) -> None:
        """Raise CheckpointError unless the model has read the files that a checkpoint names.

        `where`: begins the message. Reads the files, unless size and time are the same.
        """
        for entry in entries:
            source = self._source_for(entry)
            if source is None:
                raise CheckpointError(
                    f"{where}{len(set(entry['parameters']))} of its weights are in "
                    f"{entry['folder']} (sha256 {entry['sha256']}), and this model was built "
                    "without reading weights from a file: build it with those, as "
                    f"{entry['key']}={entry['name']} does"
                )
            actual = source.sha256_beside(entry)
            if actual != entry["sha256"]:
                raise CheckpointError(
                    f"{where}its frozen weights were read from {entry['folder']}, of sha256 "
                    f"{entry['sha256']}, but {source.folder} has other ones now, of sha256 "
                    f"{actual}: put the former back, or say where they are by {_way_out(entry)}"
                )

    def _source_for(self, entry: Mapping[str, Any]) -> WeightsSource | None:
        """Return what this model read an entry's parameters from; else the first of its sources."""
        for source, names in self._names.items():
            if names.issuperset(entry["parameters"]):
                return source
        return next(iter(self._names), None)


def entries_of(names: Mapping[str, WeightsSource | None]) -> list[dict[str, Any]]:
    """Return what a checkpoint says of the parameters that it leaves out; hashes their files."""
    entries = dict[WeightsSource, dict[str, Any]]()
    for name, source in names.items():
        if source is None:
            continue
        if source not in entries:
            entries[source] = {
                "key": source.key,
                "name": source.name,
                "folder": str(source.folder),
                "sha256": source.sha256(),
                "files": source.stamps,
                "parameters": [],
            }
        entries[source]["parameters"].append(name)
    return [*entries.values()]


def read_entries(payload: Mapping[str, Any], where: str = "") -> list[dict[str, Any]]:
    """Return the entries of a checkpoint, which are a stranger's; [] if it has all weights.

    Raises CheckpointError for another form.
    """
    entries = payload.get(KEY, [])
    if not isinstance(entries, list):
        raise CheckpointError(f"{where}{KEY} is no list but {entries!r:.80}")
    for entry in entries:
        fault = form_fault(entry, _FORM) if isinstance(entry, dict) else "it is no dict"
        if fault is None and not all(isinstance(name, str) for name in entry["parameters"]):
            fault = "its 'parameters' are no names"
        if fault is not None:
            raise CheckpointError(f"{where}an entry of {KEY} is malformed: {fault}")
    return entries


def left_out(payload: Mapping[str, Any]) -> set[str]:
    """Return the names of the parameters that a checkpoint leaves out."""
    return _parameters_of(read_entries(payload))


def without(state: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without the parameters of these names."""
    return {name: value for name, value in state.items() if name not in names}


def completed(state: Mapping[str, Any], model_state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a checkpoint's state dict with the model's own tensors where it has none."""
    return {**model_state, **state}


def with_weights(payload: Mapping[str, Any], lent: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a checkpoint that holds these weights, too, and borrows none; its averages as well."""
    filled = dict(payload)
    filled.pop(KEY, None)
    filled["model"] = completed(payload["model"], lent)
    if "model" in payload["ema"]:
        filled["ema"] = {**payload["ema"], "model": completed(payload["ema"]["model"], lent)}
    return filled


@contextmanager
def explaining_missing(payload: Mapping[str, Any] | None, model: Any, where: str) -> Iterator[None]:
    """Say that the files of a checkpoint's weights are gone, if that is why a model is not built.

    `model`: the section of the configuration. Raises CheckpointError.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        keys = {problem.key for problem in getattr(error, "problems", [])}
        values = [value for _, value in leaves(model)]
        for entry in read_entries(payload or {}):
            # An error that names no key, or the whole model, may be about these files.
            is_about_it = not keys or not keys.isdisjoint({"", "model", entry["key"]})
            if entry["name"] in values and is_about_it and _is_gone(entry):
                raise CheckpointError(
                    f"{where}its frozen weights were read from {entry['folder']} (sha256 "
                    f"{entry['sha256']}), and {entry['key']}={entry['name']} is not there, or not "
                    f"whole: put it back, or say where it is now by {_way_out(entry)}"
                ) from error
        raise


def _parameters_of(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    names = set[str]()
    for entry in entries:
        names.update(entry["parameters"])
    return names


def _way_out(entry: Mapping[str, Any]) -> str:
    """Return the override that says where the files of an entry are."""
    if entry["key"] == "model.name":
        return "model.name=DIR"
    return f"{entry['key']}=FILE"


def _is_gone(entry: Mapping[str, Any]) -> bool:
    """Return whether the files of an entry are not where they were, or not seen from here."""
    folder = Path(entry["folder"])
    place = Path(entry["name"]).expanduser()
    is_path = place.name in (folder.name, *entry["files"])  # else a name on the hub
    if is_path and not place.exists():
        return True
    return not all((folder / name).exists() for name in entry["files"])
