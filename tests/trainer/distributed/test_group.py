"""Processes of a group agree on when to stop and, on several nodes, on the attempt's number."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from trainer.distributed import peers
from trainer.distributed import processes as agreement
from trainer.distributed.processes import ProcessGroup
from trainer.errors import PeerError


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


PATIENCE = timedelta(seconds=5)


@contextmanager
def meeting():
    """Yield the keys of a store, and what lets processes arrive, which returns their futures."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)

    def arrive(*ranks, patience=PATIENCE):
        own = [TCPStore("localhost", store.port, is_master=False, timeout=patience) for _ in ranks]
        return [
            pool.submit(peers.agreed_attempt, connection, rank, 3, patience)
            for connection, rank in zip(own, ranks, strict=True)
        ]

    with ThreadPoolExecutor(3) as pool:
        yield PrefixStore("regimen/attempts", store), arrive


def numbers(futures):
    return [future.result() for future in futures]


def test_all_learn_one_number_of_each_attempt(ranks):
    def check(_):
        with meeting() as (_, arrive):
            assert [numbers(arrive(2, 0, 1)) for _ in range(3)] == [[n] * 3 for n in "012"]

    ranks(1, check)


def test_who_was_there_in_an_attempt_before_is_not_mistaken(ranks):
    def check(_):
        with meeting() as (keys, arrive):
            numbers(arrive(0, 1, 2))
            before = keys.get("here/1").decode()
            main = arrive(0)
            while keys.get(f"number/{before}") != b"1":  # the main process finds what was left
                pass
            assert numbers([*main, *arrive(1, 2)]) == ["1"] * 3

    ranks(1, check)


@pytest.mark.parametrize("there", [(0, 1), (1,)], ids=["to_the_main_process", "to_another"])
def test_one_that_does_not_come_is_told_of(ranks, there):
    def check(_):
        with meeting() as (_, arrive):
            for future in arrive(*there, patience=timedelta(seconds=0.5)):
                with pytest.raises(PeerError, match=r"did not answer within 0\.5 s"):
                    future.result()

    ranks(1, check)


def test_launchers_of_one_node_count_alike(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    peers.settle_attempt(None, 1, 2, PATIENCE)  # asks nobody
    assert peers.attempt() == "4"
