"""What is read from disk is what was written, or it is refused in one line."""

import collections
import datetime
import io
import os
import pathlib
import pickle
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.checkpoints.archive import DamagedCheckpointError
from trainer.checkpoints.reader import FORMAT_VERSION
from trainer.checkpoints.store import CheckpointStore, compare_names, model_only, read_checkpoint
from trainer.errors import CheckpointError

PAYLOAD = {
    "model": {"weight": torch.arange(2000.0), "bias": torch.ones(3)},
    "optimizer": {"state": {"weight": {"momentum": torch.ones(300)}}},
    "state": {"counters": {"global_step": 10}},
    "rng": [1, 2, (3, None)],
    "config": "seed: 1\n",
}


def assert_plain_refusal(error, path):
    message = str(error)
    assert str(path) in message
    assert "\n" not in message
    assert "weights_only" not in message
    assert error.exit_code == 4


def test_a_saved_payload_comes_back(store):
    path = store.save(PAYLOAD, step=10)
    loaded = store.load(path)
    assert loaded["format_version"] == FORMAT_VERSION
    assert loaded["rng"] == [1, 2, (3, None)]
    assert torch.equal(loaded["model"]["weight"], torch.arange(2000.0))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda b: b"", id="empty"),
        pytest.param(lambda b: b[:4], id="4-bytes"),
        pytest.param(lambda b: b[:100], id="100-bytes"),
        pytest.param(lambda b: b[: len(b) // 2], id="half"),
        pytest.param(lambda b: b[:-1], id="one-byte-short"),
        pytest.param(lambda b: bytes(len(b)), id="zeros"),
        pytest.param(lambda b: b[:1000] + bytes(len(b) - 1000), id="zeros-from-1000"),
        pytest.param(lambda b: random.Random(1).randbytes(len(b)), id="random"),
        pytest.param(lambda b: b"<!DOCTYPE html><html>404</html>", id="html"),
        pytest.param(lambda b: b"version https://git-lfs.github.com/spec/v1\n", id="lfs-pointer"),
        pytest.param(lambda b: b"\x80\x02N.", id="pickled-none"),
    ],
)
@pytest.mark.parametrize("indexed", [True, False])
def test_damage_is_refused_in_one_line(store, damage, indexed):
    path = store.save(PAYLOAD, step=10)
    content = path.read_bytes()
    path.write_bytes(damage(content))
    if not indexed:
        (store.folder / "index.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        store.load(path)
    assert_plain_refusal(caught.value, path)


@pytest.mark.parametrize("name", ["step-00000010.pt", "last.pt"])
def test_no_flipped_bit_passes(store, name):
    store.save(PAYLOAD, step=10)
    path = store.folder / name
    original = path.read_bytes()
    generator = random.Random(0)
    for _ in range(50):
        content = bytearray(original)
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            store.load(path)
        assert_plain_refusal(caught.value, path)
    path.write_bytes(original)
    assert store.load(path)["config"] == "seed: 1\n"


def test_a_flipped_bit_in_a_tensor_needs_no_index(store):
    path = store.save(PAYLOAD, step=10)
    (store.folder / "index.json").unlink()
    content = bytearray(path.read_bytes())
    start = content.index(torch.arange(2000.0).numpy().tobytes()[:64])
    for offset in range(50):
        content[start + offset * 97] ^= 4
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match="CRC"):
            store.load(path)
        content[start + offset * 97] ^= 4


def test_a_copied_name_that_changed_is_noticed(store):
    store.save(PAYLOAD, step=10)
    last = store.folder / "last.pt"
    other = CheckpointStore(store.folder.parent / "other")
    foreign = other.save({**PAYLOAD, "config": "seed: 2\n"}, step=10)
    last.unlink()
    last.write_bytes(foreign.read_bytes())
    with pytest.raises(DamagedCheckpointError, match="sha256"):
        store.load(last)


class Payload:
    """Runs a command when unpickled by anything but a weights-only load."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def as_zip(value, path):
    torch.save(value, path)


def as_raw_2(value, path):
    path.write_bytes(pickle.dumps(value, protocol=2))


def as_raw_4(value, path):
    path.write_bytes(pickle.dumps(value, protocol=4))


def as_legacy(value, path):
    torch.save(value, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("form", [as_zip, as_raw_2, as_raw_4, as_legacy])
@pytest.mark.parametrize("reader", [read_checkpoint, model_only])
@pytest.mark.parametrize("forced", [False, True], ids=["", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_code_is_refused_and_never_run(tmp_path, monkeypatch, form, reader, forced):
    import os

    canary, path = tmp_path / "canary", tmp_path / "evil.pt"
    form({"model": Payload(os.system, f"touch {canary}"), "format_version": FORMAT_VERSION}, path)
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(
        CheckpointError, match=r"refused: contains code \(posix\.system\)"
    ) as caught:
        reader(path)
    assert_plain_refusal(caught.value, path)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        pytest.param(eval, ("1",), "builtins.eval", id="eval"),
        pytest.param(getattr, (1, "real"), "builtins.getattr", id="getattr"),
        pytest.param(pickle.loads, (b"N.",), "pickle.loads", id="pickle"),
        pytest.param(torch.load, ("x",), "torch.serialization.load", id="torch.load"),
        pytest.param(np.load, ("x",), "numpy.load", id="numpy.load"),
        pytest.param(__import__("subprocess").Popen, ("x",), "subprocess.Popen", id="Popen"),
    ],
)
def test_other_calls_count_as_code(tmp_path, call, arguments, name):
    path = tmp_path / "evil.pt"
    torch.save({"model": Payload(call, *arguments), "format_version": FORMAT_VERSION}, path)
    with pytest.raises(CheckpointError, match="contains code") as caught:
        read_checkpoint(path)
    assert f"({name})" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(pathlib.PurePosixPath("x"), "pathlib.", id="path"),
        pytest.param(np.float64(1.5), "numpy", id="numpy-scalar"),
        pytest.param(np.random.get_state(), "numpy", id="numpy-rng"),
        pytest.param(collections.deque([1]), "collections.deque", id="deque"),
        pytest.param(datetime.date(2026, 1, 2), "datetime.date", id="date"),
        pytest.param(torch.nn.Linear(1, 1), "torch.nn.modules", id="module"),
    ],
)
def test_a_foreign_type_is_named(tmp_path, value, name):
    path = tmp_path / "foreign.pt"
    torch.save({"model": {}, "config": value, "format_version": FORMAT_VERSION}, path)
    with pytest.raises(CheckpointError, match="refused: contains code") as caught:
        read_checkpoint(path)
    assert name in str(caught.value)
    assert_plain_refusal(caught.value, path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript_is_refused_as_code(tmp_path):
    path = tmp_path / "script.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    with pytest.raises(CheckpointError, match="contains code") as caught:
        read_checkpoint(path)
    assert_plain_refusal(caught.value, path)


def test_a_stream_of_pickles_is_searched_whole(tmp_path):
    stream = io.BytesIO()
    pickle.dump(1, stream)
    pickle.dump({"x": Payload(eval, "1")}, stream)
    path = tmp_path / "raw.pt"
    path.write_bytes(stream.getvalue())
    with pytest.raises(CheckpointError, match=r"contains code \(builtins\.eval\)"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        pytest.param(9, "format 9 > supported 2", id="newer"),
        pytest.param(1, "format 1 < supported 2", id="older"),
        pytest.param("1", "format '1'", id="text"),
        pytest.param(True, "format True", id="bool"),
    ],
)
@pytest.mark.parametrize("auto", [True, False])
def test_another_format_is_refused_by_number(store, version, message, auto):
    store.save(PAYLOAD, step=5)
    path = store.save(PAYLOAD, step=10)
    torch.save({**PAYLOAD, "format_version": version}, path)
    with pytest.raises(CheckpointError, match=message) as caught:
        store.newest() if auto else store.load(path)
    assert_plain_refusal(caught.value, path)


def test_a_state_dict_is_no_checkpoint_of_a_run(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="format_version"):
        read_checkpoint(path)
    assert torch.equal(model_only(path)["weight"], torch.ones(2))


def test_a_missing_file_and_a_folder_are_answered(tmp_path):
    for path in (tmp_path / "none.pt", tmp_path):
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(path)
        assert_plain_refusal(caught.value, path)


def test_weights_are_read_from_a_run_directory(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(PAYLOAD, step=10)
    assert set(model_only(tmp_path)) == {"weight", "bias"}
    best = {**PAYLOAD, "model": {"best": torch.zeros(1)}}
    store.save(best, step=20, names=["best"])
    assert set(model_only(tmp_path)) == {"best"}


@pytest.mark.parametrize("value", [[], {}, {"a": 1}, {"model": {"w": "x"}}, torch.ones(2)])
def test_what_holds_no_weights_is_refused(tmp_path, value):
    path = tmp_path / "weights.pt"
    torch.save(value, path)
    with pytest.raises(CheckpointError, match="contains no weights"):
        model_only(path)


def test_legacy_weights_of_torch_are_read(tmp_path):
    path = tmp_path / "weights.pth"
    as_legacy({"state_dict": {"w": torch.arange(3)}}, path)
    assert torch.equal(model_only(path)["w"], torch.arange(3))


def test_the_first_misfit_is_named_and_the_others_counted():
    saved = {
        "model": {"a": torch.ones(2), "fc.weight": torch.ones(10, 4), "fc.bias": torch.ones(10)}
    }
    model = {"a": torch.ones(2), "fc.weight": torch.ones(5, 4), "fc.bias": torch.ones(5)}
    with pytest.raises(CheckpointError) as caught:
        compare_names(saved, model)
    message = str(caught.value)
    assert "fc.weight is [10, 4] in it, [5, 4] in the model (+1 more)" in message
    compare_names(saved, saved["model"])


@pytest.mark.parametrize(
    ("saved", "model", "message"),
    [
        pytest.param({}, {"b": torch.ones(1)}, "b is missing in it, [1] in the model", id="lacks"),
        pytest.param({"b": torch.ones(1)}, {}, "b is [1] in it, missing in the model", id="extra"),
    ],
)
def test_missing_and_unexpected_names_are_misfits(saved, model, message):
    with pytest.raises(CheckpointError) as caught:
        compare_names({"model": saved}, model, pathlib.Path("x.pt"))
    assert message in str(caught.value)
    assert "x.pt" in str(caught.value)


def test_reading_leaves_nothing_open(store):
    path = store.save(PAYLOAD, step=10)
    held = store.load(path)["model"]["weight"]
    path.write_bytes(b"")  # would change a mapped tensor
    assert held.sum() == torch.arange(2000.0).sum()


def _rewritten(path: Path, change: Callable[[zipfile.ZipFile, zipfile.ZipFile], None]) -> None:
    content = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(content) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
        change(old, new)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("spelled", [str, str.upper])
def test_an_archive_with_two_entries_of_a_name_is_refused(
    tmp_path: Path, spelled: Callable[[str], str]
) -> None:
    path = tmp_path / "step.pt"
    torch.save({"format_version": FORMAT_VERSION}, path)

    def twice(old: zipfile.ZipFile, new: zipfile.ZipFile) -> None:
        name = next(n for n in old.namelist() if n.endswith("data.pkl"))
        new.writestr(spelled(name), old.read(name))

    _rewritten(path, twice)
    with pytest.raises(CheckpointError, match="twice"):
        read_checkpoint(path)


def test_a_compressed_archive_is_refused(tmp_path):
    plain, packed = tmp_path / "plain.pt", tmp_path / "packed.pt"
    torch.save(PAYLOAD, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(DamagedCheckpointError):
        read_checkpoint(packed)


EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
LIMITS = settings(
    max_examples=EXAMPLES,
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
    st.tuples(st.just("append"), positions, st.binary(min_size=1, max_size=64)),
)


def apply(content, damage):
    kind, where, data = damage
    at = int(where * len(content))
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ data[0]]) + content[at + 1 :] if content else b""
    if kind == "overwrite":
        return content[:at] + data + content[at + len(data) :]
    if kind == "insert":
        return content[:at] + data + content[at:]
    if kind == "remove":
        return content[:at] + content[at + len(data) :]
    return content + data


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    store = CheckpointStore(tmp_path_factory.mktemp("checkpoints"))
    path = store.save(PAYLOAD, step=10)
    loose = tmp_path_factory.mktemp("loose") / path.name
    return store, path, loose, path.read_bytes()


@given(damage=st.lists(damages, min_size=1, max_size=3))
@LIMITS
def test_beside_its_index_only_the_very_bytes_pass(saved, damage):
    store, path, _, original = saved
    content = original
    for step in damage:
        content = apply(content, step)
    path.write_bytes(content)
    if content == original:
        assert same(store.load(path), {**PAYLOAD, "format_version": FORMAT_VERSION})
        return
    with pytest.raises(CheckpointError) as caught:
        store.load(path)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)


@given(damage=st.lists(damages, min_size=1, max_size=3))
@LIMITS
def test_without_an_index_no_value_changes_in_silence(saved, damage):
    store, _, loose, content = saved
    for step in damage:
        content = apply(content, step)
    loose.write_bytes(content)
    try:
        loaded = store.load(loose)
    except CheckpointError:
        return
    assert same(loaded, {**PAYLOAD, "format_version": FORMAT_VERSION})


def test_a_part_that_is_marked_as_a_folder_is_damage(saved):
    store, _, loose, content = saved
    entries = [found.start() for found in re.finditer(b"PK\x01\x02", content)]
    assert len(entries) > 5
    for at in entries:
        loose.write_bytes(apply(content, ("flip", (at + 38.5) / len(content), b"\x10")))
        with pytest.raises(CheckpointError, match="is damaged in 'archive/"):
            store.load(loose)


@given(content=st.binary(max_size=400))
@LIMITS
def test_any_bytes_are_answered(saved, content):
    store, _, loose, _ = saved
    loose.write_bytes(content)
    for read in (store.load, model_only):
        with pytest.raises(CheckpointError):
            read(loose)


@given(content=st.text(max_size=200))
@LIMITS
def test_any_index_is_answered(saved, content):
    store, path, _, original = saved
    path.write_bytes(original)
    index = path.parent / "index.json"
    kept = index.read_bytes()
    try:
        index.write_text(content, encoding="utf-8", errors="surrogateescape")
    except UnicodeEncodeError:
        return
    try:
        assert store.newest() is not None
    finally:
        index.write_bytes(kept)


def same(first, second):
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
