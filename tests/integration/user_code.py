"""What a user may have written: copied as `users.py` into the folder that a run starts in."""

import json
import traceback

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import Dataset

from regimen.data.sources import Digits
from regimen.trainer.task import StepOutput, Task


class Signal(BaseException):
    pass


RAISED = {"exit": SystemExit(0), "generator": GeneratorExit(), "base": Signal("on")}


class Bad(Dataset):
    """Samples like the digits', of which number 7 raises what it is told to."""

    classes = tuple("0123456789")

    def __init__(self, raises=None, dtype="int64", when="sample", form="pair", **digits):
        if when == "start":
            raise SystemExit(0)
        self.raises = raises
        self.dtype = getattr(torch, dtype)
        self.form = form

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 7 and self.raises:
            raise RAISED[self.raises]
        image = torch.zeros(1, 16, 16)
        label = torch.tensor(index % 10, dtype=self.dtype)
        forms = {"dict": {"image": image, "label": label}, "words": (image, "cat"), "none": None}
        return forms.get(self.form, (image, label))


class Endless:
    def __getitem__(self, index):
        return torch.zeros(1, 16, 16), 0


class Few(Digits):
    """Two epochs of 8 updates, the last of them short: many runs in little time."""

    def __len__(self):
        return 500


class Pictures(Dataset):
    classes = ("dark", "light")

    def __init__(self, count, transform=None):
        self.count = count
        self.transform = transform

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        picture = torch.full((3, 12, 10), 10 + index, dtype=torch.uint8)
        return (self.transform(picture) if self.transform else picture), index % 2


class Faulty(nn.Module):
    def __init__(self, leave=False, **mlp):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.leave = leave

    def forward(self, x):
        if self.leave:
            raise SystemExit(0)
        return self.weight.nonsense


class Narrow(nn.Module):
    def __init__(self, num_classes, features):
        super().__init__()
        self.head = nn.Linear(features, num_classes)

    def forward(self, images):
        return self.head(images.flatten(1))


class Nothing(Narrow):
    def forward(self, images):
        self.head(images.flatten(1))


class Heads(nn.Module):
    """Several outputs by name, one of them large."""

    def __init__(self):
        super().__init__()
        self.size = nn.Linear(3, 1)
        self.place = nn.Linear(3, 2)

    def forward(self, x):
        x = x.mean((2, 3))
        return {"size": self.size(x)[:, 0], "place": self.place(x), "map": x.repeat(1, 20)}


class Both(Task):
    """Train `Heads`."""

    def training_step(self, model, batch):
        out = model(batch[0])
        return StepOutput((out["size"] - batch[1]).square() + out["place"].square().sum(1))


class Mapping(Task):
    def training_step(self, model, batch):
        return {"loss": model(batch[0]).square().mean()}


class Stepless(Task):
    pass


class Recording(SGD):
    """Write down the frames that its step was called from."""

    def step(self, closure=None):
        frames = [(f.filename, f.name) for f in traceback.extract_stack()[:-1]]
        with open("frames.json", "w") as file:
            json.dump(frames, file)
