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
from collections import Counter
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
    if order is None:
        order = Shuffled(len(dataset), 5)
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


def counted(micro):
    """Return the inputs of a micro-batch, without the borrowed samples."""
    return micro.batch[0][: micro.batch_slice.count]


def generators():
    """Return the states of the training's own generators."""
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, True), (3, False), (3, True)])
def test_neither_workers_nor_the_position_change_a_batch(noisy, workers, persistent):
    options = {"num_workers": workers, "persistent_workers": persistent}
    with loading(noisy(), batch_size=2) as plain:  # more batches than all workers have ahead
        first = drain(plain, 0)
        second = drain(plain, 1)
    before = generators()

    with loading(noisy(), batch_size=2, **options) as loader:
        assert same(drain(loader, 0), first)
        assert same(drain(loader, 1), second)
        for start, stop in ((0, 3), (2, 10), (4, 9), (10, 10)):
            assert same(drain(loader, 1, start, stop), second[start:stop])

    assert not same(first, second)
    assert generators() == before


@pytest.mark.quick
def test_augmentation_is_keyed_by_the_sample_whatever_the_order_and_the_split(noisy):
    with loading(noisy(), Sequential(20)) as loader:
        whole = torch.cat(drain(loader, 1))
        next_epoch = torch.cat(drain(loader, 2))

    parts = []
    for rank in range(2):
        split = {"gradient_accumulation_steps": 2, "rank": rank, "world_size": 2}
        with loading(noisy(), split=split) as loader:
            parts += [counted(micro) for micro in loader.epoch(1)]
    shuffled = torch.cat(parts)

    assert not torch.equal(next_epoch, whole)
    assert not torch.equal(shuffled, whole)
    by_index = shuffled[:, 0].argsort()
    assert torch.equal(shuffled[by_index], whole)
    draws = whole[:, 1:]
    assert len(draws.unique()) == 60


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
    dataset = noisy(110)

    with loading(dataset, make(noisy())) as loader:
        whole = torch.cat(drain(loader, 1))
        indices = []
        for micro in loader.epoch(1):
            indices += micro.batch_slice.indices

    drawn_before = Counter()
    expected = []
    with preserved_rng():
        for index in indices:
            own_key = [SAMPLE, 1, index]
            if drawn_before[index] > 0:
                own_key.append(drawn_before[index])
            seed_rng(key(5, *own_key))
            inputs, _ = dataset[index]
            expected.append(inputs)
            drawn_before[index] += 1
    assert max(drawn_before.values()) > 2
    assert torch.equal(whole, torch.stack(expected))
    draws = whole[:, 1:]
    assert len(draws.unique()) == 3 * len(whole)


BROKEN = r"(?m)^sample 10 \(/pictures/10\.jpg\): ValueError: broken in two lines$"


@pytest.mark.parametrize("make", REPEATING.values(), ids=REPEATING)
def test_a_sample_drawn_twice_is_augmented_alike_whatever_the_split(noisy, make):
    dataset = noisy(110)
    with loading(dataset, make(noisy())) as loader:
        expected = torch.cat(drain(loader, 1, 1, 3))

    parts = {}
    for rank in range(2):
        split = {"gradient_accumulation_steps": 2, "world_size": 2, "rank": rank}
        with loading(dataset, make(noisy()), split=split, num_workers=rank) as loader:
            drain(loader, 0)
            for start in (1, 2):  # in the middle of an epoch
                for micro in loader.epoch(1, start, start + 1):
                    place = micro.batch_slice.update, micro.batch_slice.start
                    parts.setdefault(place, []).append(counted(micro))

    in_order = []
    for place in sorted(parts):
        in_order += parts[place]
    assert torch.equal(torch.cat(in_order), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample_is_named_and_where_it_broke(noisy, workers):
    with (
        loading(noisy(bad={10: "raise"}), num_workers=workers, timeout=2.0) as loader,
        pytest.raises(DataError, match=BROKEN) as caught,
    ):
        drain(loader)

    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    assert "in __getitem__" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("kill", "was killed by SIGKILL at sample 10"),
        ("exit", "left with exit code 3 at sample 10"),
        ("hang", r"gave no batch for 2 s \(loader.timeout\) at sample 10"),
        ("memory", "out of memory: MemoryError"),
    ],
)
def test_a_lost_worker_is_named_with_its_sample(noisy, fault, text):
    with (
        loading(noisy(bad={10: fault}), num_workers=2, timeout=2.0) as loader,
        pytest.raises((DataError, WorkerError), match=text) as caught,
    ):
        drain(loader)

    assert caught.value.exit_code == 8
    assert "\n" not in str(caught.value)


def test_workers_survive_signals_to_the_group(noisy):
    with loading(noisy(), num_workers=2, persistent_workers=True) as loader:
        before = signal.getsignal(signal.SIGCHLD)
        expected = drain(loader)

        for worker in processes(loader):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                os.kill(worker.pid, number)

        assert same(drain(loader), expected)
        assert signal.getsignal(signal.SIGCHLD) == before


def test_workers_leave_with_their_epoch_or_the_loader(noisy):
    with loading(noisy(), num_workers=2, persistent_workers=True) as loader:
        drain(loader)
        workers = processes(loader)
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


def labels_of(dataset, on_error):
    with loading(dataset, Sequential(len(dataset)), 32, on_error=on_error) as loader:
        return torch.cat([micro.batch[1] for micro in loader.epoch(0)])


@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_a_subclass_with_its_own_getitem_is_not_bypassed(on_error):
    labels = labels_of(Digits("val"), on_error)
    relabelled = labels_of(_Relabelled("val"), on_error)

    assert torch.equal(relabelled, 9 - labels)


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
    every = torch.arange(24.0).view(6, 4)
    with loading(_Indexed(), Sequential(6), 3, num_workers=workers) as loader:
        for micro in loader.epoch(0):
            rows = every[list(micro.batch_slice.indices)]
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


def first_batch(dataset, **options):
    with loading(dataset, Sequential(4), collate_fn=_as_list, **options) as loader:
        return next(iter(loader.epoch(0))).batch


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_sends_any_tensor_unchanged(context):
    expected = first_batch(_Kinds())
    found = first_batch(_Kinds(), num_workers=1, multiprocessing_context=context)

    for here, sent in zip(expected, found, strict=True):
        deep = here.pop("deep")
        sent_deep = sent.pop("deep")
        assert torch.equal(deep.tensor, sent_deep.tensor)
        assert deep.text == sent_deep.text
        for name, value in here.items():
            assert type(sent[name]) is type(value)
            assert sent[name].dtype == value.dtype
            assert torch.equal(sent[name].to_dense(), value.to_dense())
        sent["half"].add_(1)  # it is the receiver's own
        assert not torch.equal(sent["half"], here["half"])


def _load_and_die(dataset, writer):
    """Write the numbers of the workers into a pipe, and be killed within an epoch."""
    with loading(dataset, num_workers=2) as loader:
        epoch = loader.epoch(0)
        next(epoch)
        numbers = [worker.pid.to_bytes(4) for worker in processes(loader)]
        os.write(writer, b"".join(numbers))
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_leave_when_their_parent_is_gone(noisy):
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            _load_and_die(noisy(), writer)
        finally:
            os._exit(1)
    os.close(writer)
    os.waitpid(parent, 0)

    for _ in range(2):
        pid = int.from_bytes(os.read(reader, 4))
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:  # it has left already
            continue
        readable, _, _ = select.select([descriptor], [], [], 20)
        assert readable
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
    """Return the micro-batches of two epochs, and their loader."""
    options = {"max_skipped": 5, "num_workers": workers, "on_error": on_error, **options}
    micros = []
    with loading(dataset, **options) as loader:
        for epoch in range(2):
            micros += loader.epoch(epoch)
    return micros, loader


def _replacement(index):
    """Return what stands for a broken sample: the first of its keyed draws that is whole."""
    for attempt in range(9):
        drawn = key(5, REPLACEMENT, index, attempt) % 20
        if drawn not in BAD:
            return drawn
    raise AssertionError("all of the first draws are broken")


@pytest.mark.parametrize("workers", [0, 2])
def test_training_replaces_broken_samples_by_a_rule(noisy, workers):
    micros, _ = _skipping(noisy(bad=BAD), "replace", workers)

    whole, _ = _skipping(noisy(), "raise")
    for found, intact in zip(micros, whole, strict=True):
        assert found.batch_slice == intact.batch_slice
        for slot, index in enumerate(intact.batch_slice.indices):
            inputs = found.batch[0][slot]
            if index in BAD:
                assert int(inputs[0]) == _replacement(index)
            else:
                assert torch.equal(inputs, intact.batch[0][slot])


@pytest.mark.parametrize("workers", [0, 2])
def test_replacements_are_the_same_whatever_the_split(noisy, workers):
    whole, _ = _skipping(noisy(bad=BAD), "replace", workers)
    split, _ = _skipping(noisy(bad=BAD), "replace", split={"gradient_accumulation_steps": 3})

    of_whole = torch.cat([micro.batch[0] for micro in whole])
    of_split = torch.cat([micro.batch[0] for micro in split])
    assert torch.equal(of_split, of_whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_samples_are_told_once_and_kept(noisy, workers, caplog):
    _, loader = _skipping(noisy(bad=BAD), "replace", workers)

    assert caplog.text.count("/pictures/3.jpg") == 1
    first, second = sorted(loader.skipped, key=lambda entry: entry.index)
    assert first.index == 3
    assert first.path == "/pictures/3.jpg"
    assert first.reason == "sample 3 (/pictures/3.jpg): ValueError: broken in two lines"
    assert second.index == 11


WEIGHTS = [0.0] * 20
WEIGHTS[3] = WEIGHTS[4] = WEIGHTS[9] = 1.0


@pytest.mark.parametrize(
    "order",
    [
        lambda data: Weighted(data, 5, WEIGHTS, 20),
        lambda data: SamplerOrder([3, 11, 4, 9], 5),
        lambda data: GivenBatches([[3, 4], [11, 9]], 5),
    ],
    ids=["weighted", "torch", "batches"],
)
def test_a_replacement_is_one_of_the_samplers_own(noisy, order):
    dataset = noisy(bad=BAD)

    micros, _ = _skipping(dataset, "replace", order=order(dataset))

    inputs = torch.cat([micro.batch[0] for micro in micros])
    assert set(inputs[:, 0].tolist()) == {4, 9}


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_drops_broken_samples(noisy, workers):
    micros, loader = _skipping(noisy(bad=BAD), "drop", workers, order=Sequential(20))

    first_epoch = micros[:4]
    sound = [index for index in range(20) if index not in BAD]
    named = []
    read = []
    for micro in first_epoch:
        named += micro.batch_slice.indices[: micro.batch_slice.count]
        read += micro.batch[0][:, 0].tolist()
    assert named == sound
    assert read == sound
    assert [micro.batch_slice.count for micro in first_epoch] == [5, 5, 6, 2]
    assert len(loader.skipped) == 2


def test_an_update_of_broken_samples_alone_borrows_one_that_does_not_count(noisy):
    dataset = noisy(bad=dict.fromkeys(range(6), "raise"))

    (first, *_), _ = _skipping(dataset, "drop", order=Sequential(20), max_skipped=10)

    inputs = first.batch[0]
    assert first.batch_slice.count == 0
    assert inputs.shape == (1, 4)
    assert int(inputs[0, 0]) > 5


def test_evaluation_keeps_samples_that_occur_twice(noisy):
    order = SamplerOrder([4, 3, 4, 5, 4, 6], 5)

    micros, _ = _skipping(noisy(bad=BAD), "drop", order=order)

    first = micros[0]
    assert first.batch_slice.draws() == [(4, 0), (4, 1), (5, 0), (4, 2), (6, 0)]
    assert first.batch_slice.count == 5
    assert first.batch[0][:, 0].tolist() == [4, 4, 5, 4, 6]


@pytest.mark.parametrize("on_error", ["replace", "drop"])
def test_too_many_broken_samples_end_the_run(noisy, on_error):
    with pytest.raises(DataError, match=r"more than data\.max_skipped=1: sample \d+ "):
        _skipping(noisy(bad=BAD), on_error, max_skipped=1)


@pytest.mark.parametrize("on_error", ["replace", "drop"])
def test_broken_samples_alone_end_the_run(noisy, on_error):
    dataset = noisy(4, bad=dict.fromkeys(range(4), "raise"))
    with pytest.raises(DataError, match="replacements could not be loaded"):
        _skipping(dataset, on_error, max_skipped=100)


@pytest.mark.parametrize("on_error", ["replace", "drop"])
def test_broken_samples_count_after_a_resume_too(noisy, on_error):
    with loading(noisy(bad=BAD), on_error=on_error, max_skipped=2) as resumed:
        resumed.load_skipped_state([[7, None, "sample 7"]])
        with pytest.raises(DataError, match="3 samples could not be loaded"):
            drain(resumed)
        assert resumed.skipped_state()[0] == [7, None, "sample 7"]
