"""Flags in memory that processes share."""

import os

import pytest
import torch

from trainer.distributed import shared_flags
from trainer.distributed.processes import ProcessGroup
from trainer.distributed.shared_flags import SharedFlags, share_flags


def in_group(function):
    def run(rank):
        group = ProcessGroup("gloo", 30)
        group.join(torch.device("cpu"))
        result = function(group)
        group.leave()
        return result

    return run


def test_each_call_is_counted_by_itself(ranks, tmp_path):
    def count(group):
        shared_flags._FOLDER = tmp_path
        flags, counts, before = share_flags(group, 30), [], None
        for call in range(200):
            own = flags.raise_flag(call % (group.rank + 2) == 0)
            counts += [] if before is None else [before.result()]
            before = own
            group.barrier()
        return counts

    expected = [sum(call % (rank + 2) == 0 for rank in range(3)) for call in range(199)]
    assert ranks(3, in_group(count)) == [expected] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cannot", [0, 1])
def test_where_one_process_cannot_none_does(ranks, tmp_path, cannot):
    def share(group):
        missing = group.rank == cannot
        shared_flags._FOLDER = tmp_path / "missing" if missing and not cannot else tmp_path
        if missing and cannot:
            shared_flags.SharedFlags = refuse
        return share_flags(group, 30)

    assert ranks(2, in_group(share)) == [None, None]
    assert list(tmp_path.iterdir()) == []


def refuse(*_):
    raise OSError("no such file")


def test_one_that_never_comes_is_told_of(tmp_path):
    (tmp_path / "cells").write_bytes(bytes(32))
    flags = SharedFlags(tmp_path / "cells", 0, 2, timeout=0.1)
    with pytest.raises(RuntimeError, match="timed out waiting"):
        flags.raise_flag(True).result()


def test_processes_of_several_machines_share_nothing(ranks):
    def setup(group):
        return group._agreement._flags is None

    def apart(rank):
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        return in_group(setup)(rank)

    assert ranks(2, apart) == [True, True]
    assert ranks(2, in_group(setup)) == [False, False]
