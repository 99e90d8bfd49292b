"""What is read from disk is what a run wrote, or it is refused in one line."""

import collections
import copy
import functools
import io
import json
import os
import pathlib
import pickle
import random
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import toy_runs
from regimen.scripts.runs.resume import saved_config
from regimen.trainer.checkpoints import reader
from regimen.trainer.checkpoints.archive import (
    DamagedCheckpointError,
    read_safetensors,
    write_safetensors,
)
from regimen.trainer.checkpoints.reader import (
    FORMAT_VERSION,
    Index,
    check_payload,
    compare_names,
    model_only,
    read_checkpoint,
)
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import CheckpointError, StorageError
from regimen.trainer.tasks.classification import Classification
from toy_runs import Call, refused
from toys import CLASSES, differences, points, trainer_of

PAYLOAD = {
    "model": {"weight": torch.arange(2000.0), "bias": torch.ones(3)},
    "optimizer": {"state": {"weight": {"momentum": torch.ones(300)}}},
    "state": {"counters": {"global_step": 10}},
    "rng": [1, 2, (3, None)],
    "config": "seed: 1\n",
}
WHOLE = {**PAYLOAD, "format_version": FORMAT_VERSION}


class Saved(NamedTuple):
    store: CheckpointStore
    path: Path  # of its checkpoint
    loose: Path  # a place without an index
    content: bytes  # of the checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    store = CheckpointStore(tmp_path_factory.mktemp("checkpoints"))
    path = store.save(PAYLOAD, step=10)
    loose = tmp_path_factory.mktemp("loose") / path.name
    return Saved(store, path, loose, path.read_bytes())


@pytest.mark.parametrize("name", ["step-00000010.pt", "last.pt"])
def test_no_flipped_bit_passes(tmp_path, name):
    store = CheckpointStore(tmp_path)
    store.save(PAYLOAD, step=10)
    path = store.folder / name
    original = path.read_bytes()
    generator = random.Random(0)
    for _ in range(50):
        content = bytearray(original)
        place = generator.randrange(len(content))
        bit = 1 << generator.randrange(8)
        content[place] ^= bit
        path.write_bytes(content)
        refused(path)

    path.write_bytes(original)
    held = read_checkpoint(path)
    path.write_bytes(b"")  # would change a mapped tensor

    assert differences(held, WHOLE) == []


def as_raw(value, path, protocol=2):
    path.write_bytes(pickle.dumps(value, protocol=protocol))


as_legacy = functools.partial(torch.save, _use_new_zipfile_serialization=False)
FORMS = [torch.save, as_raw, functools.partial(as_raw, protocol=4), as_legacy]


@pytest.mark.parametrize("form", FORMS, ids=["zip", "raw", "raw-4", "legacy"])
@pytest.mark.parametrize("reader", [read_checkpoint, model_only])
@pytest.mark.parametrize("forced", ["", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_code_is_refused_and_never_run(tmp_path, monkeypatch, form, reader, forced):
    canary = tmp_path / "canary"
    path = tmp_path / "evil.pt"
    code = Call(os.system, f"touch {canary}")
    form({"model": code, "format_version": FORMAT_VERSION}, path)
    if forced:
        monkeypatch.setenv(forced, "1")

    told = refused(path, CheckpointError, reader)

    assert "refused: contains code (posix.system)" in told
    assert not canary.exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Call(eval, "1"), "eval"),
        (Call(torch.load, "x"), "torch.serialization.load"),
        (pathlib.PurePosixPath("x"), "pathlib."),
        (np.float64(1.5), "numpy"),
        (collections.deque([1]), "collections.deque"),
    ],
    ids=["eval", "torch.load", "a path", "a number of numpy", "a deque"],
)
def test_a_foreign_type_is_named(tmp_path, value, name):
    path = tmp_path / "foreign.pt"
    torch.save({**WHOLE, "config": value}, path)
    assert f"refused: contains code ({name}" in refused(path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_scripted_model_is_refused_as_code(tmp_path):
    path = tmp_path / "foreign.pt"
    scripted = torch.jit.script(torch.nn.Linear(2, 2))
    torch.jit.save(scripted, path)
    assert "contains code" in refused(path)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (9, "format 9 > supported 2"),
        (1, "format 1 < supported 2"),
        ("1", "format '1'"),
        (True, "format True"),
    ],
)
def test_another_format_is_refused_by_number(tmp_path, version, message):
    store = CheckpointStore(tmp_path)
    store.save(PAYLOAD, step=5)
    torch.save({**PAYLOAD, "format_version": version}, store.path_of(10))

    assert message in refused(store.path_of(10))
    with pytest.raises(CheckpointError, match=message):
        store.newest()  # is no damage, over which an older one would be taken


def test_what_is_no_file_is_answered(tmp_path):
    pipe = tmp_path / "pipe.pt"
    os.mkfifo(pipe)
    for path in (tmp_path / "none.pt", tmp_path, pipe):
        refused(path)


def test_what_is_no_file_of_safetensors_is_answered(tmp_path):
    path = tmp_path / "best.safetensors"
    assert "cannot be read" in refused(path, DamagedCheckpointError, read_safetensors)
    for content in (b"", bytes(20), b"<html></html>"):
        path.write_bytes(content)
        assert ": damaged" in refused(path, DamagedCheckpointError, read_safetensors)


def repack(content, path, compression, second_name=None):
    """Write an archive anew, its pickle once more under a second name if that is given."""
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(path, "w", compression) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
            if second_name is not None and name.endswith("data.pkl"):
                new.writestr(second_name(name), old.read(name))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("compression", "second_name"),
    [
        pytest.param(zipfile.ZIP_STORED, str, id="the same name twice"),
        pytest.param(zipfile.ZIP_STORED, str.upper, id="in capitals"),
        pytest.param(zipfile.ZIP_DEFLATED, None, id="compressed"),
    ],
)
def test_archives_that_torch_does_not_write_are_refused(saved, compression, second_name):
    repack(saved.content, saved.loose, compression, second_name)
    assert "its archive is" in refused(saved.loose)


def test_an_entry_that_is_marked_as_a_folder_is_refused(saved):
    content = saved.content
    entries = [found.start() for found in re.finditer(b"PK\x01\x02", content)]
    assert len(entries) > 5
    for entry in entries:
        where = (entry + 38.5) / len(content)  # the attributes of a file
        saved.loose.write_bytes(apply(content, ("flip", where, b"\x10")))
        assert "its archive is" in refused(saved.loose)


LIMITS = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
positions = st.floats(0, 1, exclude_max=True)
damages = st.one_of(
    st.tuples(st.just("cut"), positions, st.just(b"")),
    st.tuples(st.just("flip"), positions, st.integers(0, 7).map(lambda bit: bytes([1 << bit]))),
    st.tuples(st.just("overwrite"), positions, st.binary(min_size=1, max_size=64)),
    st.tuples(st.just("insert"), positions, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("remove"), positions, st.binary(min_size=1, max_size=8)),
)


def apply(content, damage):
    """Return the content with one damage, at a share of its length."""
    kind, where, data = damage
    at = int(where * len(content))
    before = content[:at]
    behind = content[at + len(data) :]
    if kind == "cut":
        return before
    if kind == "remove":
        return before + behind
    if kind == "insert":
        return before + data + content[at:]
    if kind == "flip":
        data = bytes(byte ^ data[0] for byte in content[at : at + 1])
    return before + data + behind


@pytest.mark.parametrize("indexed", [True, False])
@given(damage=st.lists(damages, min_size=1, max_size=3))
@LIMITS
def test_no_value_changes_in_silence(saved, indexed, damage):
    """Beside its index only the very bytes pass."""
    content = saved.content
    for step in damage:
        content = apply(content, step)
    place = saved.path if indexed else saved.loose
    place.write_bytes(content)
    try:
        loaded = read_checkpoint(place)
    except CheckpointError:
        refused(place)
        return

    assert differences(loaded, WHOLE) == []

    if indexed:
        assert content == saved.content


@given(content=st.binary(max_size=400))
@example(content=b"<!DOCTYPE html><html>404</html>")
@example(content=b"PK\5\6" + bytes(18))  # an archive of nothing
@example(content=b"\x80\x02N.")  # a pickled None
@LIMITS
def test_any_bytes_are_answered(saved, content):
    for place in (saved.path, saved.loose):
        place.write_bytes(content)
        for read in (read_checkpoint, model_only):
            refused(place, reader=read)


@given(content=st.text(max_size=200))
@settings(LIMITS, max_examples=LIMITS.max_examples // 5)
def test_any_index_is_answered(saved, content):
    saved.path.write_bytes(saved.content)
    index = saved.path.parent / "index.json"
    kept = index.read_bytes()
    index.write_text(content, encoding="utf-8", errors="replace")
    try:
        assert saved.store.newest() is not None
    finally:
        index.write_bytes(kept)


def test_weights_are_read_from_a_run_directory(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(PAYLOAD, step=10)
    assert set(model_only(tmp_path)) == {"weight", "bias"}

    best = {**PAYLOAD, "model": {"best": torch.zeros(1)}}
    store.save(best, step=20, names=["best"])
    assert set(model_only(tmp_path)) == {"best"}


def test_weights_are_read_from_a_file(tmp_path):
    path = tmp_path / "weights.pth"
    as_legacy({"state_dict": {"w": torch.arange(3)}}, path)

    assert torch.equal(model_only(path)["w"], torch.arange(3))
    assert "format_version" in refused(path)
    for value in ([], {}, {"a": 1}, {"model": {"w": "x"}}, torch.ones(2)):
        torch.save(value, path)
        assert "contains no weights" in refused(path, reader=model_only)


WEIGHTS = {
    "transposed": torch.randn(3, 4).T,
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 2),
    "half": torch.randn(5).bfloat16(),
    "flags": torch.tensor([True, False]),
    "double": torch.randn(2, dtype=torch.float64, requires_grad=True),
}


def test_weights_come_back_from_safetensors(tmp_path):
    path = tmp_path / "best.safetensors"
    tied = torch.ones(1000)
    write_safetensors(path, {**WEIGHTS, "a": tied, "b": tied})

    for loaded in (model_only(path), safetensors.torch.load_file(path)):
        assert loaded.keys() == {*WEIGHTS, "a", "b"}
        for name, tensor in WEIGHTS.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)

    held = read_safetensors(path)
    path.write_bytes(b"")
    assert held["a"].sum() == held["b"].sum() == 1000


def test_a_file_that_cannot_be_written_is_absent(tmp_path):
    complex_weights = {"a": torch.ones(1, dtype=torch.complex128)}
    with pytest.raises(StorageError, match="no such file"):
        write_safetensors(tmp_path / "no" / "w.safetensors", {"a": torch.ones(1)})
    with pytest.raises(StorageError, match=r"w\.safetensors: the format does not.*complex128"):
        write_safetensors(tmp_path / "w.safetensors", complex_weights)
    assert list(tmp_path.iterdir()) == []


PATH = pathlib.Path("x.pt")
PARTS = ("model", "optimizer", "lr_scheduler", "scaler", "ema", "callbacks", "state", "rng")
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))


def make_trainer():
    return trainer_of(Classification(CLASSES), points(), max_epochs=1)


@pytest.fixture(scope="module")
def whole():
    trainer = make_trainer()
    trainer.fit()
    return trainer.state_dict()


@pytest.fixture
def payload(whole):
    return copy.deepcopy(whole)


def put(payload, path, value):
    """Set what stands at a path of keys and numbers."""
    *parents, last = path.split("/")
    for name in parents:
        key = int(name) if name.isdigit() else name
        payload = payload[key]
    payload[last] = value


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("held", "model", "inside", "wanted"),
    [
        pytest.param({}, {"b": ONE}, "b is missing", "float32[1]", id="lacks"),
        pytest.param({"b": ONE}, {}, "b is float32[1]", "missing", id="extra"),
        pytest.param({"b": ONE.double()}, {"b": ONE}, "b is float64[1]", "float32[1]", id="type"),
        pytest.param(
            {"a": ONE, "w": torch.ones(10, 4), "b": torch.ones(10)},
            {"a": ONE, "w": torch.ones(5, 4), "b": torch.ones(5)},
            "w is float32[10, 4]",
            "float32[5, 4]",
            id="shapes",
        ),
    ],
)
def test_the_first_misfit_is_named_and_the_others_counted(held, model, inside, wanted):
    message = f"x.pt: does not fit the model: {inside} in it, {wanted} in the model"
    if len(model) == 3:  # two of them differ
        message += " (+1 more)"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        compare_names({"model": held}, model, PATH)
    compare_names({"model": held}, held)


@pytest.mark.parametrize("key", [*PARTS, "config"])
def test_a_part_that_is_missing_or_of_another_type_is_named(payload, key):
    misfit = rf"^x\.pt: [^\n]*\b{key} is (missing|no)[^\n]*$"
    lacking = {name: value for name, value in payload.items() if name != key}
    for spoilt in (lacking, {**payload, key: None}, {**payload, key: 7}):
        with pytest.raises(CheckpointError, match=misfit):
            check_payload(spoilt, PATH)


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        pytest.param("state/counters/global_step", -1, "no count but -1", id="negative"),
        pytest.param("state/counters/position", "1" * 999, "no count", id="text"),
        pytest.param("optimizer/x", torch.zeros(1).expand(10**12), "larger than what", id="huge"),
        pytest.param("callbacks/x", ENDLESS, "expands to more", id="endless"),
    ],
)
def test_a_value_that_no_run_writes_is_named(payload, monkeypatch, path, value, text):
    monkeypatch.setattr(reader, "_MOST_VALUES", 10_000)
    put(payload, path, value)
    with pytest.raises(CheckpointError, match=rf"^x\.pt: [^\n]*{re.escape(text)}[^\n]*$"):
        check_payload(payload, PATH)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(BOMB, id="endless aliases"),
        pytest.param("a: !!python/object/apply:os.system ['true']\n", id="code"),
        pytest.param("a: &a [*a]\n", id="a circle"),
        pytest.param("- 1\n", id="a list"),
        pytest.param("x" * 1_000_001, id="huge"),
    ],
)
def test_a_hostile_configuration_is_refused(text):
    with pytest.raises(CheckpointError, match=r"^x\.pt: [^\n]*configuration[^\n]*$"):
        saved_config({"config": text}, PATH)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer", {}),
        ("lr_scheduler/tracks", 3),
        ("model/0.weight", 3),
        ("rng", [5]),
        ("rng/0/python", 3),
        ("rng/0/torch", 3),
        ("state/sums/0/sums", 3),
    ],
)
def test_a_state_that_does_not_fit_is_one_line(payload, path, value):
    put(payload, path, value)
    trainer = make_trainer()
    with pytest.raises(CheckpointError, match=r"^[^\n]+$"):
        trainer.load_state_dict(payload)


def test_what_a_run_writes_fits_and_another_number_of_threads_is_said(payload):
    check_payload(payload, PATH)
    notes = make_trainer().load_state_dict(payload)
    assert notes == []

    made_with = payload["state"]["made_with"]
    threads = made_with["threads"]
    made_with["threads"] = threads + 1
    (note,) = make_trainer().load_state_dict(payload)

    assert note.startswith(f"threads: saved with {threads + 1}, goes on with {threads}")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"names": {"../best": {}}}, id="a name"),
        pytest.param({"files": {"../step-00000001.pt": {}}}, id="a key of files"),
        pytest.param({"names": {"best": {"file": "/etc/passwd"}}}, id="an absolute file"),
        pytest.param({"names": {"best": {"file": "link.pt"}}}, id="a link that leads out"),
        pytest.param({"names": {"best": {"facts": {"shards": "../.."}}}}, id="a folder of shards"),
        pytest.param({"names": {"best": {"file": ["step-00000001.pt"]}}}, id="a list"),
    ],
)
def test_an_index_whose_names_lead_out_is_no_index(tmp_path, change, caplog):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (tmp_path / "run").mkdir()
    store = CheckpointStore(tmp_path / "run/checkpoints")
    store.save(toy_runs.payload(1.0), step=1)
    (store.folder / "link.pt").symlink_to(secret)
    path = store.folder / "index.json"
    index = json.loads(path.read_text())
    entry = index["names"]["last"]
    for part, entries in change.items():
        for name, fields in entries.items():
            index[part][name] = {**entry, **fields}
    path.write_text(json.dumps(index))

    assert Index.read(store.folder) == Index()
    assert "is damaged and is set up anew" in caplog.text

    CheckpointStore(store.folder).clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "secret"]
    assert secret.stat().st_nlink == 1
