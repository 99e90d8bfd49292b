"""Loading: the same tensors for any number of workers, from any position, and every fault told."""

import ctypes
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

from regimen.data.errors import DataError, WorkerError
from regimen.data.keys import REPLACEMENT, SAMPLE, key, preserved_rng, seed_rng
from regimen.data.loading.loader import Loader
from regimen.data.mixture import Mixture
from regimen.data.orders import Repeated, Sequential, Shuffled, Weighted
from regimen.data.samplers import GivenBatches, SamplerOrder, UpdateSampler
from regimen.data.sources import Digits


@contextmanager
def loading(dataset, order=None, batch_size=6, split=None, **options):
    order = Shuffled(len(dataset), 5) if order is None else order
    sampler = UpdateSampler(order, batch_size=batch_size, **(split or {}))
    loader = Loader(dataset, sampler, seed=5, **options)
    try:
        yield loader
    finally:
        loader.close()


def processes(loader):
    assert loader._workers is not None
    return list(loader._workers.processes)


def drain(loader, epoch=0, *span):
    return [micro.batch[0] for micro in loader.epoch(epoch, *span)]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, True), (3, False), (3, True)])
def test_neither_workers_nor_the_position_change_a_batch(noisy, workers, persistent):
    options = {"num_workers": workers, "persistent_workers": persistent}
    with (  # more batches than all workers have ahead
        loading(noisy(), batch_size=2) as plain,
        loading(noisy(), batch_size=2, **options) as loader,
    ):
        epochs = [drain(plain, epoch) for epoch in range(2)]
        training = [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
        assert same(drain(loader, 0), epochs[0])
        assert same(drain(loader, 1), epochs[1])
        for start, stop in ((0, 3), (2, 10), (4, 9), (10, 10)):
            assert same(drain(loader, 1, start, stop), epochs[1][start:stop])
    assert not same(*epochs)
    now = [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
    assert now == training


@pytest.mark.quick
def test_augmentation_is_keyed_by_the_sample_whatever_the_order_and_the_split(noisy):
    with loading(noisy(), Sequential(20)) as loader:
        whole = torch.cat(drain(loader, 1))
        assert not torch.equal(torch.cat(drain(loader, 2)), whole)
    parts = []
    for rank in range(2):
        split = {"gradient_accumulation_steps": 2, "rank": rank, "world_size": 2}
        with loading(noisy(), split=split) as loader:
            parts += [micro.batch[0][: micro.batch_slice.count] for micro in loader.epoch(1)]
    joined = torch.cat(parts)
    assert not torch.equal(joined, whole)
    assert torch.equal(joined[joined[:, 0].argsort()], whole)
    assert len(whole[:, 1:].unique()) == 60


REPEATING = {
    "weighted": lambda data: Weighted(data, 5, [1.0] * 19 + [30.0]),
    "repeated": lambda data: Repeated(data, 5, spread=6, repeats=3, round_to=4),
    "mixture": lambda data: Mixture({"a": data, "b": range(90)}, {"a": 1, "b": 1}).order(5, True),
    "sampler": lambda data: SamplerOrder([3, 3, 7, 3, 1, 7, 0, 3] * 2, 5),
    "batches": lambda data: GivenBatches([[1, 1, 2], [2, 1], [2, 2, 2]], 5),
}


@pytest.mark.parametrize("make", REPEATING.values(), ids=REPEATING)
def test_a_sample_drawn_twice_in_an_epoch_is_augmented_anew(noisy, make):
    """By hand: the key of the first is (seed, epoch, index), of those after it one number more."""
    dataset = noisy()
    both = noisy(110)
    with loading(both, make(dataset)) as loader:
        whole = torch.cat(drain(loader, 1))
        indices = [i for micro in loader.epoch(1) for i in micro.batch_slice.indices]
    seen = dict.fromkeys(indices, 0)
    expected = []
    with preserved_rng():
        for index in indices:
            parts = (SAMPLE, 1, index, seen[index])
            seed_rng(key(5, *parts[: 3 + (seen[index] > 0)]))
            expected.append(both[index][0])
            seen[index] += 1
    assert max(seen.values()) > 2
    assert torch.equal(whole, torch.stack(expected))
    assert len(whole[:, 1:].unique()) == 3 * len(whole)
    parts = []
    split = {"gradient_accumulation_steps": 2, "world_size": 2}
    for rank in range(2):
        with loading(both, make(dataset), split=split | {"rank": rank}, num_workers=rank) as loader:
            drain(loader, 0)
            for start in (1, 2):  # in the middle of an epoch
                parts += [
                    (
                        micro.batch_slice.update,
                        micro.batch_slice.start,
                        micro.batch[0][: micro.batch_slice.count],
                    )
                    for micro in loader.epoch(1, start, start + 1)
                ]
    parts.sort(key=lambda part: part[:2])
    with loading(both, make(dataset)) as loader:
        middle = torch.cat(drain(loader, 1, 1, 3))
    assert torch.equal(torch.cat([part for *_, part in parts]), middle)


BROKEN = r"(?m)^sample 10 \(/pictures/10\.jpg\): ValueError: broken in two lines$"


@pytest.mark.parametrize(
    ("fault", "workers", "text"),
    [
        ("raise", 0, BROKEN),
        ("raise", 2, BROKEN),
        ("kill", 2, "was killed by SIGKILL at sample 10"),
        ("exit", 2, "left with exit code 3 at sample 10"),
        ("hang", 2, r"gave no batch for 2 s \(loader.timeout\) at sample 10"),
        ("memory", 2, "out of memory: MemoryError"),
    ],
)
def test_lost_worker_is_named_with_its_sample(noisy, fault, workers, text):
    with (
        loading(noisy(bad={10: fault}), num_workers=workers, timeout=2.0) as loader,
        pytest.raises((DataError, WorkerError), match=text) as caught,
    ):
        drain(loader)
    assert caught.value.exit_code == (3 if fault == "raise" else 8)
    assert "\n" not in str(caught.value)
    assert fault != "raise" or "in __getitem__" in caught.value.__notes__[0]


def test_workers_survive_signals_to_the_group_and_leave_with_the_loader(noisy):
    with loading(noisy(), num_workers=2, persistent_workers=True) as loader:
        before = signal.getsignal(signal.SIGCHLD)
        expected = drain(loader)
        workers = processes(loader)
        for worker in workers:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                os.kill(worker.pid, number)
        assert same(drain(loader), expected)
        assert signal.getsignal(signal.SIGCHLD) == before
        epoch = loader.epoch(0)
        next(epoch)
        epoch.close()  # an abandoned epoch leaves none
        assert not any(worker.is_alive() for worker in workers)
        drain(loader)
        workers = processes(loader)
    assert not any(worker.is_alive() for worker in workers)


def _fail(worker_id):
    raise ValueError(f"worker {worker_id} has no licence")


def _as_list(samples):
    return samples


class _Ragged:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(index + 1)


class _Unsendable(_Ragged):
    def __getitem__(self, index):
        return threading.Lock()


SPAWN = {"num_workers": 1, "multiprocessing_context": "spawn"}
LISTS = {"num_workers": 1, "collate_fn": _as_list}
FEW = {"timeout": 9.0, "prefetch_factor": 4}
UNSENT = "cannot be sent from a worker process .*lock"
RAGGED = r"samples 0, 1, 2, 3 .*transforms, loader\.collate_fn"


@pytest.mark.parametrize(
    ("dataset", "options", "error", "text"),
    [
        (_Ragged(), {"num_workers": 1, "worker_init_fn": _fail}, WorkerError, "has no licence"),
        ([threading.Lock()] * 4, SPAWN, DataError, r"loader\.multiprocessing_context"),
        (_Unsendable(), LISTS, DataError, UNSENT),
        (_Ragged(), FEW, DataError, RAGGED),
    ],
    ids=["init", "data-set-cannot-be-sent", "batch-cannot-be-sent", "ragged"],
)
def test_data_that_cannot_be_loaded_are_an_error_with_a_way_out(dataset, options, error, text):
    with loading(dataset, Sequential(4), 4, **options) as loader, pytest.raises(error, match=text):
        drain(loader)


class _Relabelled(Digits):
    """What a user writes to change samples: it must not be passed over by a fast path."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, 9 - label


@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_a_subclass_with_its_own_getitem_is_not_bypassed(on_error):
    labels = []
    for dataset in (Digits("val"), _Relabelled("val")):
        with loading(dataset, Sequential(len(dataset)), 32, on_error=on_error) as loader:
            labels.append(torch.cat([micro.batch[1] for micro in loader.epoch(0)]))
    assert torch.equal(labels[1], 9 - labels[0])


class _Indexed:
    """What anyone writes who has all samples in a tensor."""

    def __init__(self):
        self.x = torch.arange(24.0).view(6, 4)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.x[index]

    def batch(self, indices):
        return self.x[indices], torch.tensor(self.x.numpy()[indices])


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_is_given_its_indices_as_a_list(workers):
    with loading(_Indexed(), Sequential(6), 3, num_workers=workers) as loader:
        for micro in loader.epoch(0):
            rows = torch.arange(24.0).view(6, 4)[list(micro.batch_slice.indices)]
            assert same(micro.batch, [rows, rows])


class _Kinds(_Ragged):
    """Samples of everything that a batch may hold."""

    def __getitem__(self, index):
        return {
            "half": torch.full((3, 2), index, dtype=torch.bfloat16),
            "bits": torch.tensor([True, False]),
            "complex": torch.ones(2, dtype=torch.complex64).conj(),
            "none": torch.empty(0, 3),
            "sparse": torch.eye(3).to_sparse(),
            "image": tv_tensors.Image(torch.ones(1, 2, 2)),
            "number": torch.tensor(float(index)),
            "deep": SimpleNamespace(text="a", tensor=torch.arange(6).view(2, 3).T),
        }


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_sends_any_tensor_unchanged(context):
    order = Sequential(4)
    options = {"num_workers": 1, "multiprocessing_context": context}
    with (
        loading(_Kinds(), order, collate_fn=_as_list) as plain,
        loading(_Kinds(), order, collate_fn=_as_list, **options) as parallel,
    ):
        expected, found = (next(iter(loader.epoch(0))).batch for loader in (plain, parallel))
    for one, other in zip(expected, found, strict=True):
        deep = one.pop("deep")
        same_deep = other.pop("deep")
        assert torch.equal(deep.tensor, same_deep.tensor)
        assert deep.text == same_deep.text
        for name, value in one.items():
            assert type(other[name]) is type(value)
            assert other[name].dtype == value.dtype
            assert torch.equal(other[name].to_dense(), value.to_dense())
        other["half"].add_(1)  # it is the receiver's own
        assert not torch.equal(other["half"], one["half"])


def test_workers_leave_when_their_parent_is_gone(noisy):
    reader, writer = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            with loading(noisy(), num_workers=2) as loader:
                epoch = loader.epoch(0)
                next(epoch)
                os.write(writer, b"".join(worker.pid.to_bytes(4) for worker in processes(loader)))
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.close(writer)
    os.waitpid(parent, 0)
    for pid in (int.from_bytes(os.read(reader, 4)) for _ in range(2)):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], 20)[0]
        os.close(descriptor)


THREADS = """
import threading
import torch
from regimen.data.loading.loader import Loader
from regimen.data.orders import Sequential
from regimen.data.samplers import UpdateSampler

def compute():
    return torch.rand(512, 512).exp() @ torch.rand(512, 512)

class Computed:
    before = staticmethod(lambda: None)
    def __len__(self):
        return 4
    def __getitem__(self, index):
        self.before()
        result = compute()
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        return result

assert torch.get_num_threads() == 2
compute()
for seconds, before in ((60.0, None), (2.0, lambda: torch.set_num_threads(2))):
    if before is not None:
        Computed.before = staticmethod(before)
    sampler = UpdateSampler(Sequential(4), batch_size=2)
    loader = Loader(Computed(), sampler, seed=1, num_workers=2, timeout=seconds)
    try:
        print(sum(len(micro.batch) for micro in loader.epoch(0)))
    except Exception as error:
        print(error)
    loader.close()
"""


def test_workers_compute_beside_a_process_that_computes_with_threads():
    """A user's own threads in a forked worker hang; that is told."""
    command = [sys.executable, "-c", THREADS]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    options = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    fine, told = subprocess.run(command, env=environment, **options).stdout.splitlines()
    assert fine == "4"
    assert "gave no batch for 2 s" in told
    assert "loader.multiprocessing_context=forkserver" in told


NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


def _first_batch(noisy):
    ctypes.CDLL(None).unshare(NEW_MOUNTS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", "/dev/shm"], check=True)
    with loading(noisy(), num_workers=2, multiprocessing_context="fork") as loader:
        next(loader.epoch(0))


def test_a_small_dev_shm_is_enough(noisy):
    """Containers have 64 MB there, which torch's workers fill."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    process = multiprocessing.get_context("fork").Process(target=_first_batch, args=(noisy,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


# `data.on_error: skip`: updates stay whole, evaluation counts nothing twice, nothing is silent.
BAD = {3: "raise", 11: "raise"}


def _skipping(dataset, on_error, workers=0, **options):
    options = {"max_skipped": 5, "num_workers": workers, "on_error": on_error, **options}
    with loading(dataset, **options) as loader:
        return [micro for epoch in range(2) for micro in loader.epoch(epoch)], loader


@pytest.mark.parametrize("workers", [0, 2])
def test_training_replaces_broken_samples_by_a_rule_and_warns_once(noisy, workers, caplog):
    micros, loader = _skipping(noisy(bad=BAD), "replace", workers)
    assert caplog.text.count("/pictures/3.jpg") == 1
    whole, _ = _skipping(noisy(), "raise")
    split, _ = _skipping(noisy(bad=BAD), "replace", split={"gradient_accumulation_steps": 3})
    images = torch.cat([micro.batch[0] for micro in micros])
    assert torch.equal(torch.cat([micro.batch[0] for micro in split]), images)
    for got, intact in zip(micros, whole, strict=True):
        assert got.batch_slice == intact.batch_slice
        for slot, index in enumerate(intact.batch_slice.indices):
            if index in BAD:
                drawn = (key(5, REPLACEMENT, index, attempt) % 20 for attempt in range(9))
                assert int(got.batch[0][slot, 0]) == next(i for i in drawn if i not in BAD)
            else:
                assert torch.equal(got.batch[0][slot], intact.batch[0][slot])
    first, second = sorted(loader.skipped, key=lambda entry: entry.index)
    assert (first.index, first.path, second.index) == (3, "/pictures/3.jpg", 11)
    assert first.reason == "sample 3 (/pictures/3.jpg): ValueError: broken in two lines"


@pytest.mark.parametrize(
    "order",
    [
        lambda data: Weighted(data, 5, [float(i in (3, 4, 9)) for i in range(20)], 20),
        lambda data: SamplerOrder([3, 11, 4, 9], 5),
        lambda data: GivenBatches([[3, 4], [11, 9]], 5),
    ],
    ids=["weighted", "torch", "batches"],
)
def test_a_replacement_is_one_of_the_samplers_own(noisy, order):
    dataset = noisy(bad=BAD)
    micros, _ = _skipping(dataset, "replace", order=order(dataset))
    assert {int(i) for micro in micros for i in micro.batch[0][:, 0]} == {4, 9}


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_drops_broken_samples(noisy, workers):
    micros, loader = _skipping(noisy(bad=BAD), "drop", workers, order=Sequential(20))
    first = micros[:4]
    seen = [i for m in first for i in m.batch_slice.indices[: m.batch_slice.count]]
    assert seen == [i for i in range(20) if i not in BAD]
    assert [int(i) for m in first for i in m.batch[0][:, 0]] == seen
    assert [m.batch_slice.count for m in first] == [5, 5, 6, 2]
    assert len(loader.skipped) == 2
    nothing_left = noisy(bad=dict.fromkeys(range(6), "raise"))
    (first, *_), _ = _skipping(nothing_left, "drop", order=Sequential(20), max_skipped=10)
    assert (first.batch_slice.count, first.batch[0].shape) == (0, (1, 4))
    assert int(first.batch[0][0, 0]) > 5


def test_evaluation_keeps_samples_that_occur_twice(noisy):
    order = SamplerOrder([4, 3, 4, 5, 4, 6], 5)
    micros, _ = _skipping(noisy(bad=BAD), "drop", order=order)
    batch_slice = micros[0].batch_slice
    assert batch_slice.draws() == [(4, 0), (4, 1), (5, 0), (4, 2), (6, 0)]
    assert batch_slice.count == 5
    assert micros[0].batch[0][:, 0].tolist() == [4, 4, 5, 4, 6]


@pytest.mark.parametrize("on_error", ["replace", "drop"])
def test_too_many_broken_samples_end_the_run(noisy, on_error):
    with pytest.raises(DataError, match=r"more than data\.max_skipped=1: sample \d+ "):
        _skipping(noisy(bad=BAD), on_error, max_skipped=1)
    nothing_else = noisy(4, bad=dict.fromkeys(range(4), "raise"))
    with pytest.raises(DataError, match="replacements could not be loaded"):
        _skipping(nothing_else, on_error, max_skipped=100)
    with loading(noisy(bad=BAD), on_error=on_error, max_skipped=2) as resumed:
        resumed.load_skipped_state([[7, None, "sample 7"]])  # counts after a resume, too
        with pytest.raises(DataError, match="3 samples could not be loaded"):
            drain(resumed)
        assert resumed.skipped_state()[0] == [7, None, "sample 7"]
