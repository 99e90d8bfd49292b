"""Processes of one machine count who asks for a stop in memory that they share."""

import os
from datetime import timedelta

import pytest
import torch

from trainer.distributed import processes as agreement
from trainer.distributed.processes import ProcessGroup


def in_group(function, **environment):
    def run(rank):
        os.environ.update(environment)
        group = ProcessGroup("gloo", 30)
        group.join(torch.device("cpu"))
        result = function(group)
        group.leave()
        return result

    return run


def test_each_call_is_counted_by_itself(ranks, tmp_path):
    def count(group):
        agreement._MEMORY = tmp_path
        flags = agreement.shared_flags(group)
        agree, counts, before = agreement.Agreement(group.control, group.timeout, flags), [], None
        for call in range(200):
            own = agree._count(call % (group.rank + 2) == 0, in_step=True)
            counts += [] if before is None else [before()]
            before = own
            group.barrier()
        return counts

    expected = [sum(call % (rank + 2) == 0 for rank in range(3)) for call in range(199)]
    assert ranks(3, in_group(count)) == [expected] * 3
    assert list(tmp_path.iterdir()) == []


def test_one_that_never_comes_is_told_of(ranks):
    def count(group):
        flags = memoryview(bytearray(32)).cast("q")
        agree = agreement.Agreement(group.control, timedelta(seconds=0.1), flags)
        with pytest.raises(RuntimeError, match="timed out waiting"):
            agree._count(True, in_step=True)()

    ranks(2, in_group(count))


def test_processes_of_several_machines_share_nothing(ranks):
    def shares(group):
        return group._agreement._flags is not None

    assert ranks(2, in_group(shares)) == [True, True]
    assert ranks(2, in_group(shares, LOCAL_WORLD_SIZE="1")) == [False, False]
