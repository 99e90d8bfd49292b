"""Processes of several nodes agree on the attempt's number."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from regimen.trainer.distributed import Group, agreed_attempt
from regimen.trainer.errors import PeerError, SilentPeerError

PATIENCE = timedelta(seconds=5)


def test_an_aborted_communicator_tells_of_the_silent_process():
    """What the next collective raises once NCCL's watchdog has ended one that waited."""
    group = Group(None, timeout=7)
    group._errors = SimpleNamespace(failure=lambda: None)
    text = (
        "NCCL communicator was aborted on rank 0. Original reason for failure was: [Rank 0] "
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, "
        "NumelIn=1, NumelOut=1, Timeout(ms)=67000) ran for 67010 milliseconds before timing out."
    )
    told = group._as_peer_error(dist.DistBackendError(text), group._errors)

    assert type(told) is SilentPeerError
    assert "within 7 s (strategy.timeout)" in str(told)


@contextmanager
def meeting():
    """Yield the keys of a store, and what lets processes arrive, which returns their futures."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)

    def arrive(*ranks, patience=PATIENCE):
        own = [TCPStore("localhost", store.port, is_master=False, timeout=patience) for _ in ranks]
        return [
            pool.submit(agreed_attempt, connection, rank, 3, patience)
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
