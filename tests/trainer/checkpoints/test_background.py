"""A copy of the state is the state as it was, in memory that is used again; work ends when told."""

import threading

import pytest
import torch

from trainer.checkpoints.background import Staging, Writer


def state():
    shared, image = torch.randn(4, 4), torch.randn(2, 3, 4, 4)
    return {
        "model": {"a": shared, "tied": shared, "half": torch.randn(3).bfloat16()},
        "views": [shared[0], shared.t(), image.to(memory_format=torch.channels_last)],
        "odd": (
            torch.tensor(7),
            torch.empty(0, 2),
            torch.eye(3).to_sparse(),
            torch.ones(1).expand(5),
        ),
        "plain": {"set": {1, 2}, "list": [1, None, "x"]},
        "shard": torch.empty(3, device="meta"),
    }


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    members = tree.values() if isinstance(tree, dict) else tree
    return [
        t for m in members if isinstance(m, dict | list | tuple | torch.Tensor) for t in tensors(m)
    ]


def pointers(tree):
    return {t.data_ptr() for t in tensors(tree) if t.layout is torch.strided and t.numel()}


def test_a_copy_is_equal_and_apart():
    original = state()
    copy = Staging().copy(original)
    before = [t.clone() for t in tensors(original)]
    for tensor in tensors(original):
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() != 5:
            tensor.add_(1)
    original["plain"]["list"].append("more")
    original["plain"]["set"].add(3)
    for then, kept in zip(before, tensors(copy), strict=True):
        assert (then.dtype, then.shape) == (kept.dtype, kept.shape)
        assert then.is_meta or torch.equal(then.to_dense(), kept.to_dense())
    assert copy["plain"] == {"set": {1, 2}, "list": [1, None, "x"]}
    assert copy["model"]["a"] is copy["model"]["tied"]
    assert copy["views"][2].is_contiguous(memory_format=torch.channels_last)


def test_memory_is_used_again():
    staging, original = Staging(), state()
    first = staging.copy(original)
    at = pointers(first)
    second = staging.copy({"new": torch.ones(2, 2), **original})
    assert pointers(second) >= at
    assert len(pointers(second)) == len(at) + 1
    assert torch.equal(second["new"], torch.ones(2, 2))
    assert pointers(staging.copy({"new": original["model"]["half"]})) < at


def test_work_is_done_beside_and_its_failure_is_raised_where_it_is_awaited():
    writer, gate, done = Writer(), threading.Event(), []
    assert not writer.busy
    writer.finish()
    writer.start(lambda: (gate.wait(20), done.append(1)))
    assert writer.busy
    assert not done
    gate.set()
    writer.finish()
    assert done == [1]
    assert not writer.busy

    writer.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.finish()
    writer.finish()


def test_without_a_thread_the_work_is_done_at_once(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer, done = Writer(), []
    writer.start(lambda: done.append(1))
    assert done == [1]
    writer.finish()
