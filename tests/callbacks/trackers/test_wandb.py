"""Against the real Weights & Biases, offline: `uv pip install wandb` runs them."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from callbacks.trackers.wandb import WandB
from conf.errors import ConfigError
from trainer.callback import Results

wandb = pytest.importorskip("wandb", reason="wandb is not installed (a large extra)")
_BLOCK, _HEAD = 32768, 7


@pytest.fixture(scope="module", autouse=True)
def service() -> Iterator[None]:
    yield
    wandb.teardown()


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file, in LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts = file.read_bytes(), 7, b""
    while at + _HEAD <= len(content):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + _HEAD])
        if not kind:
            return
        parts += content[at + _HEAD : at + _HEAD + size]
        at += _HEAD + size
        if kind in (1, 4):  # whole, last
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def read(run: Path) -> list[Any]:
    wandb.teardown()  # its process has written all when it has ended
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    return [record for file in files for record in records(file)]


def rows(run: Path) -> list[dict[str, Any]]:
    found = []
    for record in read(run):
        if record.HasField("history"):
            items = record.history.item
            found.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return found


def series(run: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows(run):
        for key, value in row.items():
            if not key.startswith("_") and key != "global_step":
                found.setdefault(key, []).append((row["global_step"], value))
    return found


def test_a_resumed_run_is_one_run_with_the_points_of_one_never_interrupted(
    make_trainer: Any, tmp_path: Path, stop_at: Any, carry_over: Any
) -> None:
    whole = make_trainer({"wandb": WandB()}, tmp_path / "whole")
    whole.fit()
    whole.end(Results("finished"))
    first = make_trainer({"wandb": WandB(), "stop": stop_at(3)}, tmp_path / "cut")
    second = make_trainer({"wandb": WandB()}, tmp_path / "cut")
    third = make_trainer({"wandb": WandB()}, tmp_path / "cut")
    first.fit()
    first.end(Results("preempted", code=143))
    carry_over(first, second)
    carry_over(first, third)
    second.fit()
    second.end(Results("failed", code=1))
    third.fit()
    third.end(Results("finished"))
    assert series(tmp_path / "cut") == series(tmp_path / "whole")
    steps = [row["_step"] for row in rows(tmp_path / "cut")]
    assert steps == sorted(set(steps))  # of three processes
    names = {path.name.split("-")[3] for path in (tmp_path / "cut" / "wandb").glob("offline-*")}
    assert len(names) == 1


def test_config_group_pictures_files_and_the_end(make_trainer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "night" / "0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: mine\nmodel: {width: 3}\n")
    (folder / "overrides.yaml").write_text("- model.width=3\n")
    (folder.parent / "sweep.json").write_text('{"swept": ["model.width"]}')
    trainer = make_trainer({"wandb": WandB()}, folder)
    trainer.fit()
    trainer.log_image("samples/val", np.zeros((2, 3, 3), np.uint8))
    trainer.log_text("words", "<hi>")
    trainer.log_histogram("weights", torch.tensor([0.0, 1.0, 1.0]), bins=2)
    trainer.end(Results("finished", {"val/loss": 0.5}))
    found = read(folder)
    (begun,) = [r.run for r in found if r.HasField("run")]
    assert (begun.project, begun.display_name, begun.run_group) == ("mine", "width=3", "mine/night")
    settings = {u.key: json.loads(u.value_json) for u in begun.config.update}
    assert settings["model"] == {"width": 3}
    last = {key: value for row in rows(folder) for key, value in row.items()}
    assert last["samples/val/_type"] == "image-file"
    assert last["words/_type"] == "html-file"
    assert last["weights/values"] == [1, 2]
    summary = {
        u.key: json.loads(u.value_json)
        for r in found
        if r.HasField("summary")
        for u in r.summary.update
    }
    assert (summary["state"], summary["val/loss"]) == ("finished", 0.5)
    (artifact,) = [a for a in (_artifact(r) for r in found) if a is not None]
    listed = {entry.path: entry.ref for entry in artifact.manifest.contents}
    assert listed["config.yaml"] == (folder / "config.yaml").as_uri()
    assert [r.exit.exit_code for r in found if r.HasField("exit")] == [0]


def _artifact(record: Any) -> Any:
    if record.HasField("artifact"):
        return record.artifact
    request = record.request if record.HasField("request") else None
    return request.log_artifact.artifact if request and request.HasField("log_artifact") else None


@pytest.mark.parametrize(
    ("state", "code"),
    [
        pytest.param("pruned", 0, id="pruned"),
        pytest.param("stopped", 0, id="stopped"),
        pytest.param("preempted", 143, id="preempted"),
        pytest.param("failed", 5, id="failed"),
    ],
)
def test_statuses(make_trainer: Any, tmp_path: Path, state: str, code: int) -> None:
    trainer = make_trainer({"wandb": WandB(artifacts=None)}, tmp_path)
    trainer.fit()
    trainer.end(Results(state, code=code))
    found = read(tmp_path)
    assert [r.exit.exit_code for r in found if r.HasField("exit")] == [code]
    assert any(r.HasField("preempting") for r in found) == (state == "preempted")


def test_a_mode_that_is_none() -> None:
    with pytest.raises(ConfigError, match="choose offline or online"):
        WandB(mode="disabled")
