"""A small project of one's own, as the text of its files: `regimen new`."""

import json
import re

from scripts.catalog.json_schema import outside

MODULE = '''\
"""A model, a data set, a task and a callback: change what you need, delete the rest."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.callback import Callback
from trainer.task import StepOutput, Task


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
            text = "\\n".join([self.title, *self.lines])
            (trainer.run_dir / "diary.txt").write_text(text + "\\n")

    def state_dict(self):  # saved in each checkpoint, so that a resumed run goes on with it
        return {"lines": list(self.lines)}

    def load_state_dict(self, state):
        self.lines = list(state["lines"])
'''

EXPERIMENT = """\
# train --config-dir conf experiment=mine
# @package _global_
# Tell waves apart by how fast they swing: seconds on a CPU.
defaults:
  - override /transforms: none
  - override /optimizer: adamw
  - override /lr_scheduler: cosine

name: mine # the run goes to runs/mine/<time>
model:
  _target_: mine.Net
  num_classes: ${data.num_classes}
  width: 16
data:
  num_classes: null # the data set knows it
  train: {_target_: mine.Waves, split: train}
  val: {_target_: mine.Waves, split: val}
  test: {_target_: mine.Waves, split: test}
task:
  _target_: mine.Classify
callbacks:
  diary:
    _target_: mine.Diary
    title: ${name}
optimizer:
  lr: 0.02
loader:
  batch_size: 16
trainer:
  max_epochs: 5
"""

TEST = '''\
"""What `mine.py` promises; `pytest` runs it."""

import torch

from mine import Classify, Net, Waves


def test_samples_fit_the_model() -> None:
    waves = Waves("train")
    inputs = torch.stack([waves[index][0] for index in range(4)])
    assert Net(num_classes=len(waves.classes))(inputs).shape == (4, 3)


def test_a_step_trains_every_parameter() -> None:
    model, waves = Net(num_classes=3), Waves("train")
    output = Classify().training_step(model, (waves.waves[:8], waves.targets[:8]))
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
'''

README = """\
# {title}

A start for a project of your own. Run these in this folder:

```bash
uv run train --config-dir conf experiment=mine                  # train
uv run train --config-dir conf experiment=mine dry_run=true     # the plan, nothing trained
uv run train --config-dir conf experiment=mine model.width=32   # change a key
uv run train -m --config-dir conf experiment=mine optimizer.lr=0.01,0.02
uv run regimen runs                                             # what was trained
uv run regimen ls                                               # what else there is to choose from
uv run pytest                                                   # the tests of this project
```

`mine.py` holds a data set, a model, a task and a callback, `conf/experiment/mine.yaml` the
experiment that names them. Nothing is registered, and nothing here is needed later: rename and
delete as you like. A module must not be named like one of Regimen's packages: conf, trainer,
models, data, callbacks, scripts.

`pyproject.toml` takes Regimen from {clone}. With Regimen's own environment
active, leave out `uv run`.
"""

_PYPROJECT = """\
[project]
name = {name}
version = "0.1.0"
requires-python = ">=3.11,<3.14"
dependencies = ["regimen"]

[dependency-groups]
dev = ["pytest>=8.4"]

[tool.uv]
package = false

[tool.uv.sources]
regimen = {{ path = {clone}, editable = true }}

[tool.pytest.ini_options]
pythonpath = ["."]
testpaths = ["tests"]
"""


def project_files(title: str, clone: str) -> dict[str, str]:
    """Return the text of each file by its path; `clone`: the folder that Regimen is taken from."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "project"
    if name == "regimen":  # a project cannot depend on its own name
        name = "my-regimen"
    return {
        "mine.py": MODULE,
        "conf/experiment/mine.yaml": outside(EXPERIMENT, "experiment"),
        "tests/test_mine.py": TEST,
        "pyproject.toml": _PYPROJECT.format(name=_toml(name), clone=_toml(clone)),
        "README.md": README.format(title=title, clone=clone),
        ".gitignore": "runs/\n.venv/\n__pycache__/\n",
    }


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # TOML's basic strings escape as JSON's do
