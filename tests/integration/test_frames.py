"""How deep a run stands where its optimizer steps: whoever debugs it reads these frames."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("conf", "data", "models", "trainer", "callbacks", "scripts")
MOST = 8
RECORDING = """
import json, traceback
from torch.optim import SGD

class Recording(SGD):
    def step(self, closure=None):
        frames = [[f.filename, f.name] for f in traceback.extract_stack()[:-1]]
        open("frames.json", "w").write(json.dumps(frames))
        return super().step(closure)
"""


def test_few_frames_of_ours_lie_between_the_command_and_a_step(train, tmp_path):
    (tmp_path / "my_optimizer.py").write_text(RECORDING)
    ended = train(
        [
            "--allow-target=my_optimizer",
            "experiment=resnet18",
            "model=mlp",
            "optimizer=sgd",
            "optimizer={_target_: my_optimizer.Recording, lr: 0.1}",
            "trainer.max_steps=1",
        ],
        folder=tmp_path,
    )
    assert ended.code == 0, ended.err
    frames = json.loads((tmp_path / "frames.json").read_text())
    names = [(Path(file).relative_to(ROOT), name) for file, name in frames if _is_ours(file)]
    print(*(f"{path}: {name}" for path, name in names), sep="\n")
    assert names[0] == (Path("scripts/regimen.py"), "main")
    assert ("trainer/trainer.py", "fit") in [(str(path), name) for path, name in names]
    assert len(names) <= MOST


def _is_ours(file: str) -> bool:
    path = Path(file)
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
