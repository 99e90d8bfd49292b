"""Find the run and the checkpoint to resume, compare the configurations, and go back to it.

A run has one history: whatever is beyond the step that it continues from is moved to `abandoned/`.
A note is written before that and removed after it. If the run is killed in between, the next
process that continues the run completes it.
"""

import copy
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from regimen.conf.addresses import is_address
from regimen.conf.check import with_defaults
from regimen.conf.errors import ConfigError, problems_at
from regimen.conf.json_text import form_fault
from regimen.conf.schema import Values
from regimen.conf.schema_trainer import strategy_node
from regimen.conf.yaml_file import plain_values
from regimen.scripts.cli.arguments import RUNS
from regimen.scripts.composition.overrides import OF_A_START, trains_the_same
from regimen.trainer import snapshot
from regimen.trainer.assembly.data import changed_data
from regimen.trainer.checkpoints.reader import check_payload, read_checkpoint
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import CheckpointError
from regimen.trainer.files.atomic import remove_orphans, replacing, storing, sync_folder, write_json
from regimen.trainer.files.names import path_below
from regimen.trainer.runs.directory import (
    locked,
    make_folder,
    name_folder,
    refuse_existing,
    refuse_links,
    reserve,
    timestamp,
)
from regimen.trainer.runs.remote import Remote
from regimen.trainer.runs.status import (
    ENDED_WELL,
    METRICS,
    TENSORBOARD,
    RunDirectoryError,
    find_unfinished,
    holds_run,
    read_json,
    read_status,
)
from regimen.trainer.targets.allow_list import TargetError, locate
from regimen.trainer.targets.instantiate import accepts_argument, is_default
from regimen.trainer.trainer import Trainer

logger = logging.getLogger("regimen")

ABSENT = object()
_ABANDONED = "abandoned"
_NOTE = "unfinished.json"
_EVENTS = "events.out.tfevents.*.regimen"
_HORIZON = ("trainer.max_epochs", "trainer.max_steps")


@dataclass(slots=True)
class Resume:
    """What a run goes on from; a new run from nothing, or from a checkpoint."""

    config: Values  # the configuration of the run
    run_dir: Path | None = None  # the run to continue; None: a new run begins
    checkpoint: Path | None = None
    payload: dict[str, Any] | None = None  # None: there is no checkpoint
    notes: list[str] = field(default_factory=list)
    new_values: bool = False  # use the hyper-parameters of the configuration, not the checkpoint's
    moved: bool = False  # whether the horizon changes
    finished: str | None = None  # why there is nothing left to train

    def apply(self, trainer: Trainer) -> None:
        """Load the checkpoint, if there is one, into `trainer`, and log what differs."""
        if self.payload is None:
            return
        self.notes += changed_data(self.payload["state"].get("data", {}), trainer.data_facts)
        same_run = self.run_dir is not None
        self.notes += snapshot.restore(trainer, self.payload, not self.new_values, same_run)
        state = trainer.state
        where = state.global_step, state.epoch, state.position
        logger.info("resumed at step %d, epoch %d, update %d of it", *where)
        for note in self.notes:
            logger.info("  %s", note)

    def leave_behind(self) -> None:
        """Move what the run did beyond this point to `abandoned/`; on the main process."""
        if self.run_dir is None:  # the checkpoint of another run, which stays unchanged
            return
        moment = Moment() if self.payload is None else Moment.of(self.payload)
        folder = go_back(self.run_dir, moment)
        if folder is not None:
            logger.info("  what the run had beyond step %d is in %s", moment.step, folder)


def new_folder(raw: Mapping[str, Any]) -> Path:
    """Return the run directory: `run_dir`, or a new folder from the run's name and the time."""
    return Path(raw["run_dir"] or reserve(name_folder(RUNS, raw["name"]), timestamp()))


def find_resume(raw: Values) -> Resume:
    """Return what a configuration's `resume` selects; nothing is written, or for a plan fetched.

    Raises CheckpointError if it cannot be resumed.
    """
    own = raw["run_dir"] and Path(raw["run_dir"])
    if raw["resume"] is None:
        return Resume(raw)
    if raw["resume"] == "auto":
        folder = own or find_unfinished(name_folder(RUNS, raw["name"]))
        if folder is None or not holds_run(folder):
            logger.info("resume=auto: there is no unfinished run, starting a new one")
            return Resume(raw)
        return _from_run(folder, raw)
    if is_address(raw["resume"]):
        with problems_at("resume"):
            remote = Remote(raw["resume"])
        if raw["dry_run"]:
            remote.index()  # whether there is a run
            return Resume(raw)
        return _from_run(_fetched(remote, raw), raw)
    path = Path(raw["resume"])
    if not path.exists():
        hint = "give auto, or the path of a run or a checkpoint"
        raise ConfigError("resume", f"there is no {path}", hint)
    if path.is_dir():
        return _from_run(path, raw)
    # Back in the run that the checkpoint belongs to, unless `run_dir` is another directory.
    run = path.absolute().parent.parent
    inside = path.absolute().parent.name == "checkpoints" and holds_run(run)
    if inside:
        refuse_links(run)
    payload = read_checkpoint(path)
    if not inside or (own is not None and own.resolve() != run.resolve()):
        return _checked(Resume(raw, None, path, payload), raw)
    found = _checked(Resume(raw, run, path, payload), raw)
    step = going_back_to(run)
    if step is not None and snapshot.log_point_of(payload).step > step:
        raise CheckpointError(
            f"{path}: the run was killed while it went back to step {step}: complete that with "
            f"run_dir={run} resume=auto; what lies beyond is kept in {run}/abandoned"
        )
    return found


def _fetched(remote: Remote, raw: Mapping[str, Any]) -> Path:
    """Fetch a run into the directory of a new one; return it."""
    address, folder = remote.address, new_folder(raw)
    if holds_run(folder):
        hint = "resume=auto goes on with it"
        raise ConfigError("resume", f"{address}: {folder} holds a run already", hint)
    refuse_existing(folder)
    make_folder(folder)
    lock = locked(folder)  # and by its file another try knows the folder again
    try:
        remote.fetch(folder)
    finally:
        lock.release()
    logger.info("fetched %s into %s", address, folder)
    return folder


def _from_run(folder: Path, raw: Values) -> Resume:
    if not holds_run(folder):
        raise ConfigError("resume", f"{folder} holds no run: it has no manifest.json")
    refuse_links(folder)
    newest = CheckpointStore(folder / "checkpoints").newest(going_back_to(folder))
    if newest is None:
        logger.info("the run was stopped before its first checkpoint: it starts from the beginning")
        return Resume(raw, folder)
    path, payload, passed = newest
    for reason in passed:
        logger.warning("warning: passed over %s", reason)
    resume = _checked(Resume(raw, folder, path, payload, [f"from {path}"]), raw)
    try:
        ended = read_status(folder).get("state")
    except RunDirectoryError as error:
        logger.warning("warning: %s: the run is resumed from its checkpoint", error)
        return resume
    if ended in ENDED_WELL and not passed and not resume.moved:
        counters = payload["state"]["counters"]
        where = f"epoch {counters['epoch']}, step {counters['global_step']}"
        resume.finished = f"{folder}: already {ended} at {where}"
    return resume


def _checked(resume: Resume, raw: Values) -> Resume:
    """Compare the configuration with that of the checkpoint, and apply `resume_policy`."""
    assert resume.payload is not None
    check_payload(resume.payload, resume.checkpoint)
    saved, policy = saved_config(resume.payload, resume.checkpoint), raw["resume_policy"]
    if isinstance(saved.get("strategy"), dict):  # a former version stored its short name
        saved["strategy"] = strategy_node(saved["strategy"])
    steps = saved.get("trainer", {}).get("gradient_accumulation_steps", 1)
    if raw["trainer"]["gradient_accumulation_steps"] == "auto":  # it was found when the run began
        raw = {**raw, "trainer": {**raw["trainer"], "gradient_accumulation_steps": steps}}
        resume.config = raw
    outside, kept, serious = dict.fromkeys(OF_A_START), copy.deepcopy(saved), []
    for key, (old, new) in changes(with_defaults(saved) | outside, raw | outside).items():
        text = f"{key}: {_shown(old)} -> {_shown(new)}"
        longer = isinstance(old, int) and isinstance(new, int) and new >= old
        horizon = key in _HORIZON
        resume.moved |= horizon
        if not (new is None or longer if horizon else _is_harmless(key, saved, raw)):
            serious.append(text)
            continue
        resume.new_values |= horizon
        resume.notes.append(f"changed: {text}")
        *parents, last = key.split(".")
        node = kept
        for parent in parents:
            node = node.setdefault(parent, {})
        if new is ABSENT:
            node.pop(last, None)
        else:
            node[last] = new
    if serious and policy == "error":
        raise CheckpointError(
            "resume: the configuration differs from that of the checkpoint: choose resume_policy="
            "keep (the old values) or resume_policy=override (the new ones)"
            + "".join(f"\n  {text}" for text in serious)
        )
    resume.notes += [f"{policy}: {text}" for text in serious]
    if serious and policy == "override":
        resume.new_values = True
    elif serious:  # the saved values, with the harmless changes and the keys of this start
        resume.config = kept | {key: raw.get(key) for key in OF_A_START}
    return resume


def _is_harmless(key: str, saved: Values, raw: Values) -> bool:
    """Return whether a run trains the same, though the value of a key has changed.

    A callback may say so of itself (`affects_result`).
    """
    section, _, inside = key.partition(".")
    name = inside.partition(".")[0]
    if section != "callbacks" or trains_the_same(key):
        return trains_the_same(key)
    nodes = [config["callbacks"].get(name) for config in (saved, raw)]
    targets = [node["_target_"] for node in nodes if node and "_target_" in node]
    return bool(targets) and not any(map(_affects_result, targets))


def _affects_result(target: str) -> bool:
    with suppress(TargetError):
        return getattr(locate(target), "affects_result", True) is not False
    return True


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "(none)"
    return "{...}" if isinstance(value, dict) and value else repr(value)  # a part has a name


def saved_config(payload: Mapping[str, Any], path: Path | None) -> Values:
    """Return the configuration in a checkpoint, which is untrusted text. Raises CheckpointError."""
    try:
        return dict(plain_values(payload["config"], "its configuration"))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.problems[0]}") from error


def changes(old: Any, new: Any, key: str = "", given: bool = False) -> dict[str, tuple[Any, Any]]:
    """Return the leaves of two nested dicts that differ, by dotted key.

    Not what one of the two leaves out and the other has at its default: so a run goes on with a
    later version, whose new keys and arguments are at their defaults and whose new parts are empty.
    For transforms and optimizers a different order of keys is a difference as well. `given`:
    whether what is compared goes to a target.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new and type(old) is type(new) else {key: (old, new)}
    found = dict[str, tuple[Any, Any]]()
    for name in {**old, **new}:
        child = f"{key}.{name}" if key else str(name)
        node = new if name in new else old
        argument = given or ("_target_" in node and accepts_argument(node, name))
        if name in old and name in new:
            found |= changes(old[name], new[name], child, argument)
        elif not (is_default(node, name) if argument else _is_empty(node[name])):
            found[child] = old.get(name, ABSENT), new.get(name, ABSENT)
    before, now = [n for n in old if n in new], [n for n in new if n in old]
    if before != now and key.startswith(("transforms", "optimizer")):
        found[f"{key} (order)"] = (before, now)
    return found


def _is_empty(value: Any) -> bool:
    """Return whether a part of the configuration names nothing: null, {}, [] or a dict of these."""
    if isinstance(value, dict):
        return all(_is_empty(child) for child in value.values())
    return value is None or value == []


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in the history of a run, with the sizes of its logs, from a checkpoint."""

    step: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of the logs, by file name
    best: tuple[int, ...] = ()  # steps of checkpoints, the best first

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Self:
        """Return the point at which the checkpoint `payload` was saved."""
        callbacks: Mapping[str, Any] = payload["callbacks"]
        saver = callbacks.get(snapshot.name_of("saver", payload) or "", {})
        sizes = dict[str, int]()
        for state in callbacks.values():
            sizes |= state.get("sizes", {}) if isinstance(state, dict) else {}
        ranking = tuple(int(step) for step, _ in saver.get("ranking", ()))
        return cls(snapshot.log_point_of(payload).step, sizes, ranking)


def going_back_to(run: Path) -> int | None:
    """Return the step of a rewind that was interrupted; None if there is none."""
    try:
        note = read_json(run / _ABANDONED / _NOTE)
    except RunDirectoryError as error:
        raise CheckpointError(f"{error}: it holds the step that the run continues from") from error
    if not note:
        return None
    fault = form_fault(note, {"step": int, "folder": str})
    if fault is not None:
        raise CheckpointError(f"{run / _ABANDONED / _NOTE}: {fault}: it says where the run goes on")
    return int(note["step"])


def go_back(run: Path, moment: Moment) -> Path | None:
    """Move whatever is beyond `moment` out of `run`; return its new folder, or None.

    Only the process that has locked the run may call this. Raises StorageError.
    """
    store, away = CheckpointStore(run / "checkpoints"), run / _ABANDONED
    logs = [run / METRICS, *(run / TENSORBOARD).glob(_EVENTS)]
    sizes = {path: moment.sizes.get(path.name, 0) for path in logs if path.is_file()}
    longer = {path: size for path, size in sizes.items() if path.stat().st_size > size}
    interrupted = going_back_to(run)
    if interrupted is None and not longer and max(store.steps(), default=0) <= moment.step:
        return None
    if interrupted == moment.step:
        try:
            folder = path_below(away, read_json(away / _NOTE)["folder"])
        except (LookupError, ValueError) as error:
            raise CheckpointError(f"{away / _NOTE}: {error!r}") from error
    else:
        folder = reserve(away, timestamp())
        write_json(away / _NOTE, {"step": moment.step, "folder": folder.name})
    for place in (away, folder, folder / "checkpoints", folder / TENSORBOARD, store.folder):
        remove_orphans(place)
    with storing(folder):
        store.rewind(moment.step, moment.best, folder / "checkpoints")
        for path, size in longer.items():
            into = folder / path.relative_to(run)
            into.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "rb") as source, replacing(into) as copied:
                source.seek(size)
                shutil.copyfileobj(source, copied, 1 << 20)
            # The copy is durable by now.
            if size or path.name == METRICS:
                os.truncate(path, size)
            else:  # nothing of it is left
                path.unlink()
        (away / _NOTE).unlink()
        sync_folder(away)
    return folder
