"""What happens to a process of a group; copied beside the runs that it happens to."""

import atexit
import os
import signal
import sys
import threading
import time

import torch

from regimen.data.sources import Digits
from regimen.trainer.callback import Callback


class Noted(Digits):
    def __getitem__(self, index):
        with open(f"{os.environ['NOTES']}-{os.environ['RANK']}", "a") as file:
            print(index, file=file)
        return super().__getitem__(index)


class Break(Callback):
    def __init__(self, how, rank=1, step=7):
        self.how = how
        self.rank = rank
        self.step = step

    def on_update_end(self, trainer):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        here = "wait" in self.how or trainer.group.rank == self.rank
        if first and here and trainer.state.updates == self.step:
            getattr(self, self.how)(trainer)

    def fail(self, trainer):
        raise ValueError("a sample of nonsense")

    def leave(self, trainer):
        os._exit(0)

    def hang(self, trainer):
        while True:
            time.sleep(1)

    def wait(self, trainer, deaf=False):
        print(f"here {trainer.group.rank}", file=sys.stderr, flush=True)
        while deaf or trainer.state.signal is None:
            time.sleep(0.01)

    def wait_deaf(self, trainer):
        self.wait(trainer, deaf=True)

    def die(self, trainer):
        os.kill(os.getpid(), signal.SIGKILL)

    def terminate(self, trainer):
        os.kill(os.getpid(), signal.SIGTERM)

    def lose_the_node(self, trainer):
        os.kill(os.getppid(), signal.SIGKILL)
        self.die(trainer)

    def preempt_the_node(self, trainer):
        os.kill(os.getppid(), signal.SIGUSR1)
        self.wait(trainer)


class Aborting:
    """Ends the process where objects are deleted while the interpreter is torn down."""

    def __init__(self):
        self.abort = os.abort

    def __del__(self):
        self.abort()


class LeaveThings(Callback):
    """Leave behind what a process has to see to when it ends, and what would abort it."""

    def on_fit_end(self, trainer):
        global aborting
        aborting = Aborting()
        rank = trainer.group.rank
        atexit.register(print, f"exit function {rank}", file=sys.stderr)
        threading.Thread(target=self.finish_late, args=(rank,)).start()

    def finish_late(self, rank):
        time.sleep(0.5)
        print(f"thread {rank}", file=sys.stderr)


class DieInTurn(Callback):
    """Lose process 1 early in the first attempt, and process 0 later in the second."""

    def on_update_end(self, trainer):
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if (attempt, trainer.group.rank, trainer.state.updates) in ((0, 1, 7), (1, 0, 25)):
            os.kill(os.getpid(), signal.SIGKILL)


class Branched(torch.nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.used = torch.nn.Linear(256, num_classes)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x.flatten(1))
