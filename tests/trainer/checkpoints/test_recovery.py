"""After a kill or damage: what is whole is found, entered and named again."""

import pytest

from toy_checkpoints import files, payload, value
from trainer.checkpoints.archive import DamagedCheckpointError
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import CheckpointError
from trainer.files.atomic import replacing


def test_nothing_saved_is_no_checkpoint(store):
    assert store.newest() is None
    store.folder.mkdir()
    assert store.newest() is None


@pytest.mark.parametrize("indexed", [True, False])
def test_the_newest_whole_one_is_taken_and_the_others_named(store, indexed):
    for step in (1, 2, 3):
        store.save(payload(step), step=step)
    store.path_of(3).write_bytes(store.path_of(3).read_bytes()[:2000])
    if not indexed:
        (store.folder / "index.json").unlink()
    found = store.newest()
    assert found is not None
    path, loaded, passed = found
    assert path == store.path_of(2)
    assert loaded["model"]["weight"][0] == 2.0
    assert len(passed) == 1
    assert str(store.path_of(3)) in passed[0]


def test_if_none_is_whole_it_is_no_fresh_start(store):
    for step in (1, 2):
        store.save(payload(step), step=step)
        store.path_of(step).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint is whole") as caught:
        store.newest()
    assert "\n" not in str(caught.value)
    for step in (1, 2):
        store.path_of(step).unlink()
    with pytest.raises(CheckpointError):
        store.newest()
    (store.folder / "last.pt").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        store.newest()


def remove(path, elsewhere):
    path.unlink()


def dangle(path, elsewhere):
    path.unlink()
    path.symlink_to("step-00000099.pt")


def point_elsewhere(path, elsewhere):
    path.unlink()
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("spoil", [remove, dangle, point_elsewhere])
def test_a_wrong_last_pointer_leads_nobody_astray(store, tmp_path, spoil):
    elsewhere = CheckpointStore(tmp_path / "other").save(payload(99), step=99)
    for step in (1, 2):
        store.save(payload(step), step=step)
    spoil(store.folder / "last.pt", elsewhere)
    found = store.newest()
    assert found is not None
    assert found[0] == store.path_of(2)
    store.clean()
    assert value(store.folder / "last.pt") == 2.0
    assert value(elsewhere) == 99.0


@pytest.mark.parametrize("spoil", [dangle, point_elsewhere])
def test_a_pointer_alone_is_no_checkpoint(store, tmp_path, spoil):
    elsewhere = CheckpointStore(tmp_path / "other").save(payload(99), step=99)
    store.save(payload(1), step=1)
    store.path_of(1).unlink()
    spoil(store.folder / "last.pt", elsewhere)
    with pytest.raises(CheckpointError):
        store.newest()


def test_an_unlisted_checkpoint_is_entered(store):
    for step in (1, 2):
        store.save(payload(step), step=step)
    (store.folder / "index.json").unlink()
    store.clean()
    assert [entry.step for entry in store.entries()] == [1, 2]
    content = bytearray(store.path_of(2).read_bytes())
    content[700] ^= 1
    store.path_of(2).write_bytes(content)
    with pytest.raises(DamagedCheckpointError):
        store.load(store.path_of(2))


def test_an_index_of_garbage_is_set_up_anew(store, caplog):
    store.save(payload(1), step=1)
    for garbage in ("", "[]", '{"files": 3}', '{"files": {"a": {}}, "names": {}, "layouts": {}}'):
        (store.folder / "index.json").write_text(garbage)
        found = store.newest()
        assert found is not None
    assert "damaged" in caplog.text
    store.save(payload(2), step=2)
    assert [entry.step for entry in store.entries()] == [2]


def test_cleaning_spares_living_writers(store):
    store.folder.mkdir()
    (store.folder / ".tmp-1-dead-step-00000001.pt").write_bytes(b"half")
    with replacing(store.folder / "x.json") as file:
        file.write(b"{}")
        file.flush()
        living = list(store.folder.glob(".tmp-x.json*"))
        assert [path.name for path in store.clean()] == [".tmp-1-dead-step-00000001.pt"]
        assert living[0].exists()
    assert files(store) == ["x.json"]
