"""Find the run and the checkpoint that `resume` selects, and compare the configurations."""

import copy
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regimen.conf.addresses import is_address
from regimen.conf.check import with_defaults
from regimen.conf.errors import ConfigError, problems_at
from regimen.conf.fields import declared
from regimen.conf.interpolation import join, leaves
from regimen.conf.schema import Values
from regimen.conf.schema_trainer import StrategyConfig, name_strategy_class
from regimen.conf.yaml_file import plain_values
from regimen.scripts.cli.arguments import RUNS
from regimen.scripts.composition.overrides import START_KEYS, trains_the_same
from regimen.trainer import snapshot
from regimen.trainer.assembly.data import changed_data
from regimen.trainer.checkpoints.borrowed import read_entries
from regimen.trainer.checkpoints.reader import check_payload, read_checkpoint
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import CheckpointError
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
from regimen.trainer.runs.rewind import RewindPoint, interrupted_rewind, rewind
from regimen.trainer.runs.status import (
    CHECKPOINTS,
    ENDED_WELL,
    RunDirectoryError,
    find_unfinished,
    holds_run,
    read_status,
)
from regimen.trainer.targets.allow_list import TargetError, locate
from regimen.trainer.targets.instantiate import accepts_argument, is_default
from regimen.trainer.trainer import Trainer

logger = logging.getLogger("regimen")

ABSENT = object()
_HORIZON_KEYS = ("trainer.max_epochs", "trainer.max_steps")
# Keys of a strategy with several processes about BatchNorm: one process has nothing to share.
_BETWEEN_PROCESSES = ("sync_batchnorm", "broadcast_buffers")


@dataclass(slots=True)
class Resume:
    """What a run starts from: its own last checkpoint, a checkpoint of another run, or nothing."""

    config: Values  # the configuration to train with
    run_dir: Path | None = None  # the run to continue; None: a new run begins
    checkpoint: Path | None = None
    payload: dict[str, Any] | None = None  # content of the checkpoint; None: there is none
    notes: list[str] = field(default_factory=list)
    new_values: bool = False  # use the hyper-parameters of the configuration, not the checkpoint's
    horizon_changed: bool = False
    finished: str | None = None  # why there is nothing left to train

    def apply(self, trainer: Trainer) -> None:
        """Load the checkpoint, if there is one, into `trainer`, and log what differs."""
        if self.payload is None:
            return
        self.notes += changed_data(self.payload["state"].get("data", {}), trainer.data_facts)
        same_run = self.run_dir is not None
        self.notes += trainer.load_state_dict(self.payload, not self.new_values, same_run)
        state = trainer.state
        logger.info(
            "resumed at step %d, epoch %d, update %d of it",
            state.global_step,
            state.epoch,
            state.position,
        )
        for note in self.notes:
            logger.info("  %s", note)

    def rewind_run(self) -> None:
        """Move what the run did beyond the checkpoint to `abandoned/`; main process only."""
        if self.run_dir is None:  # the checkpoint of another run, which stays unchanged
            return
        point = RewindPoint() if self.payload is None else RewindPoint.of(self.payload)
        folder = rewind(self.run_dir, point)
        if folder is not None:
            logger.info("  what the run had beyond step %d is in %s", point.step, folder)


def new_folder(raw: Mapping[str, Any]) -> Path:
    """Return the run directory: `run_dir`, or a new folder from the run's name and the time."""
    return Path(raw["run_dir"] or reserve(name_folder(RUNS, raw["name"]), timestamp()))


def find_resume(raw: Values) -> Resume:
    """Return what a configuration's `resume` selects.

    Writes nothing, unless `resume` is an address: that run is fetched, but not for a plan. Raises
    CheckpointError if the run cannot be resumed, ConfigError if `resume` names no run.
    """
    selected = raw["resume"]
    run_dir = Path(raw["run_dir"]) if raw["run_dir"] else None
    if selected is None:
        return Resume(raw)
    if selected == "auto":
        folder = run_dir or find_unfinished(name_folder(RUNS, raw["name"]))
        if folder is None or not holds_run(folder):
            logger.info("resume=auto: there is no unfinished run, starting a new one")
            return Resume(raw)
        return _resume_run(folder, raw)
    if is_address(selected):
        with problems_at("resume"):
            remote = Remote(selected)
        if raw["dry_run"]:
            remote.index()  # raises if there is no run
            return Resume(raw)
        return _resume_run(_fetch(remote, raw), raw)
    path = Path(selected)
    if not path.exists():
        raise ConfigError(
            "resume", f"there is no {path}", "give auto, or the path of a run or a checkpoint"
        )
    if path.is_dir():
        return _resume_run(path, raw)
    return _resume_checkpoint(path, run_dir, raw)


def _resume_checkpoint(path: Path, run_dir: Path | None, raw: Values) -> Resume:
    """Resume from a checkpoint file: in its own run, unless `run_dir` is another directory."""
    run = path.absolute().parent.parent
    is_in_run = path.absolute().parent.name == CHECKPOINTS and holds_run(run)
    if is_in_run:
        refuse_links(run)
    payload = read_checkpoint(path)
    if not is_in_run or (run_dir is not None and run_dir.resolve() != run.resolve()):
        return _compare(Resume(raw, None, path, payload), raw)
    resume = _compare(Resume(raw, run, path, payload), raw)
    step = interrupted_rewind(run)
    if step is not None and snapshot.log_point_of(payload).step > step:
        raise CheckpointError(
            f"{path}: the run was killed while it went back to step {step}: complete that with "
            f"run_dir={run} resume=auto; what lies beyond is kept in {run}/abandoned"
        )
    return resume


def _fetch(remote: Remote, raw: Mapping[str, Any]) -> Path:
    """Fetch a run into the directory of a new one; return the directory."""
    folder = new_folder(raw)
    if holds_run(folder):
        raise ConfigError(
            "resume",
            f"{remote.address}: {folder} holds a run already",
            "resume=auto goes on with it",
        )
    refuse_existing(folder)
    make_folder(folder)
    # By the lock's file another try recognises a folder whose fetch was interrupted.
    lock = locked(folder)
    try:
        remote.fetch(folder)
    finally:
        lock.release()
    logger.info("fetched %s into %s", remote.address, folder)
    return folder


def _resume_run(folder: Path, raw: Values) -> Resume:
    """Resume a run from its newest undamaged checkpoint."""
    if not holds_run(folder):
        raise ConfigError(
            "resume",
            f"{folder} holds no run: it has no manifest.json",
            "`regimen runs` lists runs; without resume a new one begins",
        )
    refuse_links(folder)
    # Checkpoints beyond an interrupted rewind belong to the abandoned history.
    newest = CheckpointStore(folder / CHECKPOINTS).newest(interrupted_rewind(folder))
    if newest is None:
        logger.info("the run was stopped before its first checkpoint: it starts from the beginning")
        return Resume(raw, folder)
    path, payload, passed_over = newest
    for reason in passed_over:
        logger.warning("warning: passed over %s", reason)
    resume = _compare(Resume(raw, folder, path, payload, [f"from {path}"]), raw)
    try:
        state = read_status(folder).get("state")
    except RunDirectoryError as error:
        logger.warning("warning: %s: the run is resumed from its checkpoint", error)
        return resume
    if state in ENDED_WELL and not passed_over and not resume.horizon_changed:
        counters = payload["state"]["counters"]
        where = f"epoch {counters['epoch']}, step {counters['global_step']}"
        resume.finished = f"{folder}: already {state} at {where}"
    return resume


def _compare(resume: Resume, raw: Values) -> Resume:
    """Compare the configuration with that of the checkpoint, and apply `resume_policy`."""
    assert resume.payload is not None
    check_payload(resume.payload, resume.checkpoint)
    saved = saved_config(resume.payload, resume.checkpoint)
    name_strategy_class(saved)
    policy = raw["resume_policy"]
    if raw["trainer"]["gradient_accumulation_steps"] == "auto":
        # The number was determined when the run began.
        steps = saved.get("trainer", {}).get("gradient_accumulation_steps", 1)
        raw = {**raw, "trainer": {**raw["trainer"], "gradient_accumulation_steps": steps}}
        resume.config = raw

    # Keys of a single start are not compared: they are null on both sides.
    ignored = dict.fromkeys(START_KEYS)
    saved_with_changes = copy.deepcopy(saved)
    moved = _moved_keys(resume.payload, saved, raw)
    refused = []
    filled = with_defaults(saved) | ignored
    for key, (old, new) in changes(filled, raw | ignored).items():
        text = f"{key}: {_format(old)} -> {_format(new)}"
        if key in _HORIZON_KEYS:
            resume.horizon_changed = True
            is_allowed = new is None or _is_longer(old, new)
        else:
            is_allowed = key in moved or _is_harmless(key, filled, raw)
        if not is_allowed:
            refused.append(text)
            continue
        if key in _HORIZON_KEYS:
            resume.new_values = True
        resume.notes.append(f"changed: {text}")
        _set(saved_with_changes, key, new)

    if refused and policy == "error":
        raise CheckpointError(
            "resume: the configuration differs from that of the checkpoint: choose resume_policy="
            "keep (the old values) or resume_policy=override (the new ones)"
            + "".join(f"\n  {text}" for text in refused)
        )
    resume.notes += [f"{policy}: {text}" for text in refused]
    if refused and policy == "override":
        resume.new_values = True
    elif refused:
        resume.config = saved_with_changes | {key: raw.get(key) for key in START_KEYS}
    return resume


def _moved_keys(payload: Mapping[str, Any], saved: Values, raw: Values) -> set[str]:
    """Return the keys that may change since they say where weights are that a checkpoint borrows.

    The hash of what is there now is compared before anything is loaded. Data and task follow the
    model: a tokenizer that was in the folder of the weights is in the new folder, too.
    """
    now = dict(leaves(raw))
    keys = set()
    for entry in read_entries(payload):
        for key, value in leaves(saved):
            follows = key.startswith(("data.", "task.")) and now.get(key) == now.get(entry["key"])
            if value == entry["name"] and (key.startswith("model.") or follows):
                keys.add(key)
    return keys


def _is_longer(old: Any, new: Any) -> bool:
    """Return whether a limit of a run was raised."""
    return isinstance(old, int) and isinstance(new, int) and new >= old


def _set(config: Values, key: str, value: Any) -> None:
    """Set a dotted key in nested dicts; `ABSENT` removes it."""
    *parents, last = key.split(".")
    node = config
    for parent in parents:
        node = node.setdefault(parent, {})
    if value is ABSENT:
        node.pop(last, None)
    else:
        node[last] = value


def _is_harmless(key: str, saved: Values, raw: Values) -> bool:
    """Return whether a run trains the same though a key has changed.

    Callbacks and strategies say so of themselves (`affects_result`), as keys of strategies do.
    """
    section, _, inside = key.partition(".")
    name = inside.partition(".")[0]
    if section == "strategy":
        return _strategy_trains_the_same(name, saved["strategy"], raw["strategy"])
    if section != "callbacks" or trains_the_same(key):
        return trains_the_same(key)
    nodes = []
    for config in (saved, raw):
        node = config["callbacks"].get(name)
        if node and "_target_" in node:
            nodes.append(node)
    return bool(nodes) and not any(map(_affects_result, nodes))


def _strategy_trains_the_same(name: str, old: Values, new: Values) -> bool:
    """Return whether the strategies `old` and `new`, of which one key differs, train the same."""
    if _affects_result(old) or _affects_result(new):
        return False
    key = declared(StrategyConfig).get(name)
    if key is None or not key.affects_result:
        return True
    if name in _BETWEEN_PROCESSES and not (name in old and name in new):
        return True
    # A strategy that lacks the key computes as with its default.
    return bool(old.get(name, key.default) == new.get(name, key.default))


def _affects_result(node: Any) -> bool:
    """Return what the class of a node says; what is not found, or says nothing, may affect it."""
    if isinstance(node, dict):
        with suppress(TargetError):
            kind = locate(str(node.get("_target_")))
            return getattr(kind, "affects_result", True) is not False
    return True


def _format(value: Any) -> str:
    if value is ABSENT:
        return "(none)"
    if isinstance(value, dict) and value:
        return "{...}"
    return repr(value)


def saved_config(payload: Mapping[str, Any], path: Path | None) -> Values:
    """Return the configuration in a checkpoint, which is untrusted text. Raises CheckpointError."""
    try:
        return dict(plain_values(payload["config"], "its configuration"))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.problems[0]}") from error


def changes(
    old: Any, new: Any, key: str = "", is_argument: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Return the leaves of two nested dicts that differ, by dotted key.

    A key that only one of them has is no difference while it is at its default, or empty. So a run
    can be resumed by a later version that has new keys and arguments. For transforms and optimizers
    another order of the keys is a difference as well. `is_argument`: whether the values are
    passed to a target, where an empty one may differ from the default.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new and type(old) is type(new) else {key: (old, new)}
    differences = dict[str, tuple[Any, Any]]()
    for name in {**old, **new}:
        # Texts are compared: they tell 1 from True, and hold the order. What is equal needs no
        # look at its target, which would be imported.
        if name in old and name in new and repr(old[name]) == repr(new[name]):
            continue
        child = join(key, name)
        node = new if name in new else old
        passed_on = is_argument or ("_target_" in node and accepts_argument(node, name))
        if name in old and name in new:
            differences |= changes(old[name], new[name], child, passed_on)
            continue
        unchanged = is_default(node, name) if passed_on else _is_empty(node[name])
        if not unchanged:
            differences[child] = (old.get(name, ABSENT), new.get(name, ABSENT))
    old_order = [name for name in old if name in new]
    new_order = [name for name in new if name in old]
    if old_order != new_order and key.startswith(("transforms", "optimizer")):
        differences[f"{key} (order)"] = (old_order, new_order)
    return differences


def _is_empty(value: Any) -> bool:
    """Return whether a part of the configuration names nothing: null, {}, [] or a dict of these."""
    if isinstance(value, dict):
        return all(_is_empty(child) for child in value.values())
    return value is None or value == []
