"""A model, a data set, a task and a callback: change what you need, delete the rest."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regimen import Callback, StepOutput, Task


class Waves:
    """Sine waves of 32 points; the class is how fast one swings."""

    classes = ("slow", "middle", "fast")  # num_classes is their number

    def __init__(self, split, samples=240, transform=None):
        draws = torch.Generator().manual_seed(("train", "val", "test").index(split))
        self.targets = torch.randint(3, (samples,), generator=draws)
        phase = 6.28 * torch.rand(samples, 1, generator=draws)
        time = torch.linspace(0, 6.28, 32)
        self.waves = torch.sin(time * (1 + 2 * self.targets[:, None]) + phase)
        self.transform = transform  # from `transforms`, if the experiment has any

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        wave = self.waves[index]
        if self.transform is not None:
            wave = self.transform(wave)
        return wave, int(self.targets[index])


class Net(nn.Module):
    """A network with one hidden layer."""

    def __init__(self, num_classes, length=32, width=16):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(length, width), nn.ReLU(), nn.Linear(width, num_classes)
        )

    def forward(self, waves: Tensor) -> Tensor:
        return self.layers(waves)


class Classify(Task):
    """What a step computes: the loss to descend, and what the metrics are summed from."""

    def metric_names(self):
        return ["loss", "accuracy"]  # logged as train/loss, val/accuracy, ...

    def training_step(self, model, batch):
        waves, labels = batch
        logits = model(waves)
        hits = (logits.argmax(1) == labels).sum()
        return StepOutput(cross_entropy(logits, labels), sums={"accuracy": (hits, len(labels))})


class Diary(Callback):
    """Write the validation accuracy of each epoch to `diary.txt` in the run's directory."""

    def __init__(self, title):
        self.title = title
        self.lines = []

    def on_validation_end(self, trainer, metrics):
        self.lines.append(f"{metrics['val/accuracy']:.3f}")

    def on_fit_end(self, trainer):
        if trainer.is_main and trainer.run_dir is not None:
            text = "\n".join([self.title, *self.lines])
            (trainer.run_dir / "diary.txt").write_text(text + "\n")

    def state_dict(self):  # saved in each checkpoint, so that a resumed run goes on with it
        return {"lines": list(self.lines)}

    def load_state_dict(self, state):
        self.lines = list(state["lines"])
