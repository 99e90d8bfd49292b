"""Find the run and the checkpoint to resume, and compare the configurations."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from conf.errors import ConfigError, Problem
from conf.schema import Config
from scripts.composition.harmless import trains_the_same
from scripts.runs.abandoned import Moment, go_back, going_back_to
from scripts.runs.changes import ABSENT, OF_A_START, changes
from scripts.runs.saved_config import saved_config
from trainer import snapshot
from trainer.build.statistics import changed_data
from trainer.checkpoints.schema import check_payload
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import CheckpointError
from trainer.files.atomic import write_text
from trainer.runs.directory import name_folder
from trainer.runs.status import (
    ENDED_WELL,
    RunDirectoryError,
    find_unfinished,
    holds_run,
    read_status,
)
from trainer.trainer import Trainer

logger = logging.getLogger("regimen")

_HORIZON = ("trainer.max_epochs", "trainer.max_steps")


@dataclass(slots=True)
class Resume:
    """What a run is resumed from."""

    config: dict[str, Any]  # the configuration of the resumed run
    run_dir: Path | None = None  # the run to continue; None: a new run begins from the checkpoint
    checkpoint: Path | None = None
    payload: dict[str, Any] | None = None  # None: the run has no checkpoint yet
    notes: list[str] = field(default_factory=list)
    new_values: bool = False  # use the hyper-parameters of the configuration, not the checkpoint's
    finished: str | None = None  # why there is nothing left to train

    def apply(self, trainer: Trainer) -> None:
        """Load the checkpoint into `trainer`, and log what differs."""
        assert self.payload is not None
        self.notes += changed_data(self.payload["state"].get("data", {}), trainer.data_facts)
        self.notes += snapshot.restore(
            trainer,
            self.payload,
            hyper_parameters=not self.new_values,
            same_run=self.run_dir is not None,
        )
        state = trainer.state
        logger.info(
            "resumed at step %d, epoch %d, update %d of it",
            state.global_step,
            state.epoch,
            state.position,
        )
        for note in self.notes:
            logger.info("  %s", note)

    def leave_behind(self) -> None:
        """Move what the run did beyond this point to `abandoned/`; on the main process."""
        if self.run_dir is None:  # the checkpoint of another run, which stays unchanged
            return
        if self.payload is not None:
            _mend_config(self.run_dir, self.payload["config"])
        moment = Moment() if self.payload is None else Moment.of(self.payload)
        folder = go_back(self.run_dir, moment)
        if folder is not None:
            logger.info("  what the run had beyond step %d is in %s", moment.step, folder)


def find_resume(config: Config, runs: Path, raw: dict[str, Any]) -> Resume | None:
    """Return the run or the checkpoint that `config.resume` selects; None for a new run.

    Raises CheckpointError if it cannot be resumed.
    """
    if config.resume is None:
        return None
    if config.resume == "auto":
        folder = (
            Path(config.run_dir)
            if config.run_dir
            else find_unfinished(name_folder(runs, config.name))
        )
        if folder is None or not holds_run(folder):
            logger.info("resume=auto: there is no unfinished run, starting a new one")
            return None
        return _from_run(folder, config, raw)
    path = Path(config.resume)
    if not path.exists():
        hint = "give auto, or the path of a run or a checkpoint"
        raise ConfigError(Problem("resume", f"there is no {path}", hint))
    if path.is_dir():
        return _from_run(path, config, raw)
    payload = CheckpointStore(path.parent).load(path)
    own_run = _own_run(path, config)
    if own_run is not None:
        _refuse_left(own_run, path, payload)
    return _checked(Resume(raw, own_run, path, payload), config, raw)


def _own_run(path: Path, config: Config) -> Path | None:
    """Return the run that a checkpoint belongs to, unless `run_dir` is another directory."""
    run = path.absolute().parent.parent
    inside = path.absolute().parent.name == "checkpoints" and holds_run(run)
    same = config.run_dir is None or Path(config.run_dir).resolve() == run.resolve()
    return run if inside and same else None


def _refuse_left(run: Path, path: Path, payload: dict[str, Any]) -> None:
    """Raise CheckpointError for a checkpoint beyond the step of an interrupted rewind."""
    step = going_back_to(run)
    if step is not None and payload["state"]["counters"]["global_step"] > step:
        raise CheckpointError(
            f"{path}: the run was killed while it went back to step {step}: complete that with "
            f"run_dir={run} resume=auto; what lies beyond is kept in {run}/abandoned"
        )


def _from_run(folder: Path, config: Config, raw: dict[str, Any]) -> Resume:
    if not holds_run(folder):
        raise ConfigError(Problem("resume", f"{folder} holds no run: it has no manifest.json"))
    newest = CheckpointStore(folder / "checkpoints").newest(going_back_to(folder))
    if newest is None:
        note = "the run was stopped before its first checkpoint: it starts from the beginning"
        return Resume(raw, folder, notes=[note])
    path, payload, passed = newest
    for reason in passed:
        logger.warning("warning: passed over %s", reason)
    resume = _checked(Resume(raw, folder, path, payload, [f"from {path}"]), config, raw)
    ended = _ended(folder)
    if ended in ENDED_WELL and not passed and not _horizon_moved(payload, raw):
        counters = payload["state"]["counters"]
        where = f"epoch {counters['epoch']}, step {counters['global_step']}"
        resume.finished = f"{folder}: already {ended} at {where}"
    return resume


def _ended(folder: Path) -> str | None:
    """Return the state of a run."""
    try:
        return read_status(folder).get("state")
    except RunDirectoryError as error:
        logger.warning("warning: %s: the run is resumed from its checkpoint", error)
        return None


def _mend_config(folder: Path, text: str) -> None:
    """Restore a damaged `config.yaml` from the checkpoint."""
    path = folder / "config.yaml"
    try:
        if isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict):
            return
    except (OSError, ValueError, yaml.YAMLError):
        pass
    logger.warning("warning: %s is damaged: written again from the checkpoint", path)
    write_text(path, text)


def _checked(resume: Resume, config: Config, raw: dict[str, Any]) -> Resume:
    """Compare the configuration with that of the checkpoint, and apply `resume_policy`."""
    assert resume.payload is not None
    check_payload(resume.payload, resume.checkpoint)
    saved = saved_config(resume.payload, resume.checkpoint)
    found = changes(saved, raw)
    harmless = {k: v for k, v in found.items() if _is_harmless(k, *v)}
    serious = {k: v for k, v in found.items() if k not in harmless}
    resume.notes += [note for k, v in harmless.items() if (note := _note(k, *v))]
    resume.new_values = any(k in _HORIZON for k in harmless)
    if not serious:
        return resume
    if config.resume_policy == "error":
        lines = "".join(f"\n  {_shown(k, *v)}" for k, v in serious.items())
        raise CheckpointError(
            "resume: the configuration differs from that of the checkpoint: choose "
            f"resume_policy=keep (the old values) or resume_policy=override (the new ones){lines}"
        )
    resume.notes += [f"{config.resume_policy}: {_shown(k, *v)}" for k, v in serious.items()]
    if config.resume_policy == "override":
        resume.new_values = True
    else:
        resume.config = _with_harmless(saved, raw, harmless)
    return resume


def _note(key: str, old: Any, new: Any) -> str:
    """Say what changed harmlessly; of a part that comes or goes its name is enough."""
    if key == "resume_policy":
        return ""
    if old is ABSENT and isinstance(new, dict):
        return f"added: {key}"
    if new is ABSENT and isinstance(old, dict):
        return f"removed: {key}"
    return f"changed: {_shown(key, old, new)}"


def _is_harmless(key: str, old: Any, new: Any) -> bool:
    if key in _HORIZON:
        return new is None or (isinstance(old, int) and isinstance(new, int) and new >= old)
    return trains_the_same(key)


def _horizon_moved(payload: dict[str, Any], raw: dict[str, Any]) -> bool:
    saved = saved_config(payload, None)
    return any(k in _HORIZON for k in changes(saved, raw))


def _with_harmless(
    saved: dict[str, Any], raw: dict[str, Any], harmless: dict[str, tuple[Any, Any]]
) -> dict[str, Any]:
    """Return the saved configuration with the harmless changes and the keys of this start."""
    result = yaml.safe_load(yaml.safe_dump(saved, sort_keys=False))
    for key, (_, new) in harmless.items():
        *parents, last = key.split(".")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        if new is ABSENT:
            node.pop(last, None)
        else:
            node[last] = new
    return dict(result | {k: raw.get(k) for k in OF_A_START})


def _shown(key: str, old: Any, new: Any) -> str:
    return f"{key}: {_value(old)} -> {_value(new)}"


def _value(value: Any) -> str:
    return "(none)" if value is ABSENT else repr(value)
