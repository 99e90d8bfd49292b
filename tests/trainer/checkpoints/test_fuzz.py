"""Whatever is done to a checkpoint's bytes: what was saved, or one line that refuses it."""

import os
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.checkpoints.store import CheckpointStore, model_only
from trainer.errors import CheckpointError

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
LIMITS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
PAYLOAD = {
    "model": {"weight": torch.arange(300.0).reshape(3, 100), "bias": torch.ones(3)},
    "optimizer": {"state": {"weight": {"momentum": torch.ones(300)}}},
    "state": {"counters": {"global_step": 10}},
    "config": "seed: 1\n",
}

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


def same(first, second):
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


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
        assert same(store.load(path), {**PAYLOAD, "format_version": 1})
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
    assert same(loaded, {**PAYLOAD, "format_version": 1})


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
