"""A group of processes within a test."""

import multiprocessing
import os
import pickle
import signal
import socket
import traceback

import pytest
import torch
import torch._dynamo  # or every process would import it with its first optimizer

from regimen.scripts.cli.signals import end_with_parent


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def be_rank(rank, world_size, port, function, pipe):
    """Run `function` with the environment of a launcher, and send what it returns or raises."""
    end_with_parent(signal.SIGKILL)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    torch.set_num_threads(1)
    try:
        pipe.send_bytes(pickle.dumps((function(rank), None)))  # `send` would share the tensors
    except BaseException:
        pipe.send_bytes(pickle.dumps((None, f"rank {rank}: {traceback.format_exc()}")))
    pipe.close()
    os._exit(0)  # no clean-up of the parent's


@pytest.fixture
def ranks():
    """Return a function that runs another one, given its rank, in each of some processes.

    It returns what they returned, by rank; a failure fails the test. Processes are forked: a
    closure will do, and nothing is imported again.
    """
    context = multiprocessing.get_context("fork")
    started = []

    def run(world_size, function, patience=60):
        pipes = []
        port = free_port()
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, world_size, port, function, sender)
            process = context.Process(target=be_rank, args=arguments, daemon=True)
            process.start()
            sender.close()
            started.append(process)
            pipes.append(receiver)
        answers = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(patience), f"rank {rank} of {world_size} does not answer"
            answers.append(pickle.loads(pipe.recv_bytes()))
        failures = [failure for _, failure in answers if failure]
        assert not failures, "\n".join(failures)
        return [value for value, _ in answers]

    yield run
    for process in started:
        process.kill()
        process.join()
