"""A run at an address, where its owner may be a stranger: what is fetched, and what is sent."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from regimen.conf.errors import ConfigError
from regimen.trainer.errors import StorageError
from regimen.trainer.runs.remote import Remote

if TYPE_CHECKING:
    from pathlib import Path

ENTRY = {
    "file": "step-00000001.pt",
    "step": 1,
    "size": 4,
    "sha256": "",
    "metrics": {},
    "facts": {},
}
INDEX = {
    "files": {"step-00000001.pt": ENTRY},
    "names": {"last": ENTRY},
    "layout": {},
}
RUN = {
    "manifest.json": b"{}",
    "tensorboard/events.out.tfevents.1.regimen": b"events",
    "checkpoints/index.json": json.dumps(INDEX).encode(),
    "checkpoints/step-00000001.pt": b"step",
}


class Listing:
    """A file system that lists whatever its owner wants."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.content = {f"http://host/run/{name}": text for name, text in files.items()}

    def cat_file(self, place: str) -> bytes:
        return self.content[place]

    def find(self, root: str, detail: bool) -> dict[str, dict[str, Any]]:
        return {place: {"size": len(text)} for place, text in self.content.items()}

    def get_file(self, place: str, path: str) -> None:
        with open(path, "wb") as file:
            file.write(self.content[place])


def at(files: dict[str, bytes]) -> Remote:
    remote = Remote("file:///run")
    remote.address = remote._root = "http://host/run"
    remote.files = Listing(files)
    return remote


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_run_is_fetched_and_nothing_that_no_run_has(tmp_path: Path) -> None:
    others = {
        "models.py": b"code",
        ".bashrc": b"code",
        "conf/model/mlp.yaml": b"",
        ".lock": b"",
    }
    stray = {"checkpoints/step-00000009.pt": b"of no index", "tensorboard/.tmp-x": b"half"}
    at({**RUN, **others, **stray}).fetch(tmp_path / "run")

    assert content(tmp_path / "run") == {**RUN, "checkpoints/last.pt": b"step"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("../../x", id="above"),
        pytest.param("tensorboard/../../x", id="above, inside of a folder of the run"),
        pytest.param("tensorboard//x", id="from the root, inside of a folder of the run"),
        pytest.param("tensorboard/..\\..\\x", id="above, by backslashes"),
        pytest.param("manifest.json\0", id="NUL"),
        pytest.param("tensorboard/out/x", id="a link that leads out"),
    ],
)
def test_a_listing_that_leads_out_is_refused_before_anything_is_copied(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "a/run"
    (folder / "tensorboard").mkdir(parents=True)
    if "out" in name:
        (folder / "tensorboard/out").symlink_to(tmp_path)

    with pytest.raises(StorageError, match="cannot read the run at http://host/run"):
        at({**RUN, name: b"theirs"}).fetch(folder)
    assert content(tmp_path) == {}


def test_a_place_elsewhere_is_refused(tmp_path: Path) -> None:
    remote = at(RUN)
    remote.files.content["http://elsewhere/manifest.json"] = b"theirs"
    with pytest.raises(StorageError):
        remote.fetch(tmp_path / "run")
    assert content(tmp_path) == {}


@pytest.mark.parametrize(
    ("names", "files"),
    [
        pytest.param({"../../x": ENTRY}, {}, id="a name that leads out"),
        pytest.param({"/tmp/x": ENTRY}, {}, id="an absolute name"),
        pytest.param({"best": {**ENTRY, "file": "../../secret"}}, {}, id="a file that leads out"),
        pytest.param({"best": {**ENTRY, "file": None}}, {}, id="a file that is none"),
        pytest.param({}, {"../../x": ENTRY}, id="a key of files"),
        pytest.param([], {}, id="a list of names"),
    ],
)
def test_an_index_that_leads_out_is_refused(names: Any, files: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    index = {
        **INDEX,
        "names": names,
        "files": {**INDEX["files"], **files},
    }
    hostile = {**RUN, "checkpoints/index.json": json.dumps(index).encode()}

    with pytest.raises(StorageError):
        at(hostile).fetch(tmp_path / "runs/run")
    assert content(tmp_path) == {"secret": b"mine"}


def test_links_are_neither_fetched_nor_sent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    copy = tmp_path / "copy"
    for name, text in RUN.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(text)
    (tmp_path / "secret").write_text("mine")
    (run / "train.log").symlink_to(tmp_path / "secret")
    (run / "checkpoints/last.pt").symlink_to("step-00000001.pt")
    Remote(f"file://{copy}").send(run)

    assert content(copy) == RUN

    os.symlink(tmp_path / "secret", copy / "metrics.jsonl")
    Remote(f"file://{copy}/").fetch(tmp_path / "again")
    assert content(tmp_path / "again") == {**RUN, "checkpoints/last.pt": b"step"}


@pytest.mark.parametrize(
    "address",
    [
        "reference://x.json",
        "reference::file:///x.json",
        "simplecache::s3://bucket/x",
        "file:///x::zip://y",
        "generic://reference://x",
        "nothing://x",
    ],
)
def test_an_address_that_leads_to_another_is_none(address: str) -> None:
    with pytest.raises(ConfigError):
        Remote(address)


def test_a_copy_that_breaks_off_is_no_run_yet(tmp_path: Path) -> None:
    remote = at(RUN)
    del remote.files.content["http://host/run/checkpoints/step-00000001.pt"]
    with pytest.raises(StorageError):  # the name `last` has no file
        remote.fetch(tmp_path / "run")
    assert not (tmp_path / "run/manifest.json").exists()
