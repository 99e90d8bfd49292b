"""The commands of the README and of docs/ run: block by block, in a folder that has what they name.

Their limits are tiny, and the network is a small one; sweeps and runs over several processes are
dry ones. What several pages show runs once. What cannot run here stands in `NOT_HERE` with its
reason.
"""

import io
import itertools
import os
import re
import shlex
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.io import write_jpeg, write_png

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(
    r"^(?: {4})?(?:uv run )?"
    r"((?:train|evaluate|predict|regimen(?! \d)|python -m scripts\.\w+) .*)$"
)
NOT_HERE = {  # by what they begin with, or hold
    "python -m scripts.benchmark": "minutes; tests/scripts/benchmarks has each with tiny sizes",
    "python -m scripts.soak": "minutes; tests/integration/test_soak.py",
    "regimen demo": "does not end; tests/integration/test_demo.py",
    "regimen tensorboard": "does not end; tests/integration/test_tensorboard_pages.py",
    "regimen doctor": "half a minute; tests/scripts/checkup",
    "regimen new": "tests/integration/test_newcomer_project.py",
    "--config-dir conf model=mine": "tests/integration/test_readme_blocks.py",
    "sweep=submitit": "needs SLURM; its local executor: tests/scripts/sweeps/launchers",
    "sweep=ray": "needs Ray; tests/scripts/sweeps/launchers",
    "data=cifar10 ": "downloads",
    "experiment=airbench94 data.root": "downloads",
    "experiment=airbench94 data=cifar10_folder": "compiles; tests/integration/test_airbench.py",
    "experiment=resnet18_cifar10 data.root": "downloads",
    "data.decode=region": "the extra jpeg; tests/data/test_region_decoding.py",
    "model.weights=torchvision:": "downloads",
}
NEEDS_RESNET = ("unfreeze", "run_dir=runs/base")  # which names its layers, or is fine-tuned
SMALLER = {  # fewer jobs, trials and samples
    "range(0,10)": "range(0,1)",
    "data.fold=0,1,2,3,4": "data.fold=0,1",
    "n_trials=30": "n_trials=2",
    "=1024": "=16",
    "model=resnet18": "model=small_cnn",
}
NO_REPORT = "sweep.report=false"
LIMITS = ["debug=fast", "loader.batch_size=8", "loader.eval_batch_size=8", "loader.num_workers=0"]


def blocks():
    """Return the commands that stand below one another, by page and line."""
    found = {}
    for path in PAGES:
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        matches = ((number, COMMAND.match(line)) for number, line in lines)
        for is_match, group in itertools.groupby(matches, lambda pair: pair[1] is not None):
            if is_match:
                (first, match), *more = group
                name = f"{path.relative_to(ROOT).with_suffix('')}-{first}"
                found[name] = [
                    m[1].partition(" # ")[0].strip() for m in [match, *(m for _, m in more)]
                ]
    return found


def reason(command):
    """Return why a command does not run here, or None."""
    return next((why for part, why in NOT_HERE.items() if part in command + " "), None)


def pictures(folder, count, split="", size=32):
    """Write digits as PNG files, a folder for each class."""
    images, labels = load_digits(return_X_y=True)
    for index, (image, label) in enumerate(zip(images[:count], labels, strict=False)):
        place = folder / split / (f"class{label % 2}" if split else "")
        place.mkdir(parents=True, exist_ok=True)
        grown = torch.from_numpy(image.reshape(1, 8, 8) * 15).byte().repeat(3, size // 8, size // 8)
        write_png(grown, str(place / f"{index:03}.png"))


def tables(place):
    """Write what data=table, tokens, shards and the prompts are read from."""
    names = [f"c{number}" for number in range(12)]
    rows = [[(row * (number + 3)) % 7 for number in range(12)] for row in range(60)]
    lines = [",".join(map(str, [*row, sum(row), f"k{row[0] % 2}"])) for row in rows]
    for path, column in (("houses.csv", 12), ("TABLES/train.csv", 13)):
        (place / path).parent.mkdir(exist_ok=True)
        kept = [[*line.split(",")[:12], line.split(",")[column]] for line in lines]
        head = [*names, "price" if column == 12 else "kind"]
        (place / path).write_text("".join(",".join(row) + "\n" for row in [head, *kept]))
    (place / "book.txt").write_text("to be or not to be, that is the question. " * 400)
    (place / "prompts.txt").write_text("to be\nor not\n")
    (place / "TOKENS").mkdir()
    np.save(place / "TOKENS" / "train.npy", np.arange(20 * 1025, dtype=np.uint16) % 50257)
    for split in ("train", "val", "test"):
        (place / "SHARDS").mkdir(exist_ok=True)
        with tarfile.open(place / "SHARDS" / f"{split}-000.tar", "w") as shard:
            for path in sorted((place / "DIR" / split).rglob("*.png")):
                shard.add(path, f"{path.stem}.png")
                label = path.parent.name.encode()
                entry = tarfile.TarInfo(f"{path.stem}.cls")
                entry.size = len(label)
                shard.addfile(entry, io.BytesIO(label))


@pytest.fixture(scope="module")
def run(start):
    """Run a command's words in a folder, to its end."""

    def begin(words, folder):
        program, *arguments = words
        if program == "python":
            program, arguments = words[2].removeprefix("scripts."), words[3:]
        elif program == "regimen":
            program, *arguments = arguments
        return start(arguments, folder=folder, command=program).wait(300)

    return begin


@pytest.fixture(scope="module")
def world(run, tmp_path_factory):
    """Make what the pages name: data, pictures, finished runs, a sweep."""
    place = tmp_path_factory.mktemp("world")
    for split, count in (("train", 60), ("val", 20), ("test", 20)):
        pictures(place / "DIR", count, split)
    pictures(place / "photos", 3)
    write_jpeg(torch.zeros(3, 32, 32, dtype=torch.uint8), str(place / "photos" / "last.jpg"))
    pictures(place / "NEW_IMAGES", 3)
    tables(place)
    made = [
        ["train", "experiment=resnet18", "model=small_cnn", "run_dir=RUN", *LIMITS],
        ["train", "experiment=char_lm", "run_dir=runs/char_lm/TIME", *LIMITS],
        ["train", "-m", "experiment=resnet18", "model=mlp", "seed=1,2", NO_REPORT, *LIMITS],
        ["regimen", "quantize", "run=RUN", "samples=16"],
        ["regimen", "export", "run=RUN", "format=torchscript"],
        ["regimen", "cp", "experiment/resnet18", "my_configs/experiment/mine.yaml"],
    ]
    (place / "runs" / "char_lm").mkdir(parents=True)
    for words in made:
        done = run(words, place)
        assert done.code == 0, done.err
    (sweep,) = (place / "runs/resnet18/sweeps").iterdir()
    sweep.rename(sweep.with_name("TIME"))
    copy(sweep.with_name("TIME"), place / "runs/NAME/sweeps/TIME")
    (place / "RUN/exports").rename(place / "exports")  # a block that exports begins without
    os.link(place / "exports/quantized/model.onnx", place / "model.onnx")
    for name in ("runs/resnet18/TIME", "runs/pets/TIME", "runs/mine", "RUN_A", "RUN_B"):
        copy(place / "RUN", place / name)
    return place


def copy(source, target):
    shutil.copytree(source, target, copy_function=os.link, symlinks=True)


def limited(command):
    """Return a command's words with tiny limits."""
    command = re.sub(r"<time>", "TIME", command)
    for large, small in SMALLER.items():
        command = command.replace(large, small)
    command = command.replace("step-00000120", "step-00000002")
    command = command.partition(" > ")[0].replace("out=DIR", "out=OUT")
    command = command.replace("resume=runs/", "model=small_cnn resume=runs/")
    command = command.replace("embeddings:avgpool", "embeddings:pool")  # the small network's
    for kind in ("TOKENS", "TABLES", "SHARDS"):
        if f"data={kind.lower().removesuffix('s')}" in command or f"data={kind.lower()}" in command:
            command = command.replace("=DIR", f"={kind}")
    words = [word for word in shlex.split(command) if not word.startswith("[")]
    if {"predict", "export", "quantize"} & {*words[:2]}:
        return [*words, "overwrite=true"]  # commands of a block are often alternatives
    if words[0] != "train" or "--help" in words:
        return words
    given = {word.partition("=")[0] for word in words}
    limits = [limit for limit in LIMITS if limit.partition("=")[0] not in given]
    if "experiment=resnet18" in words and "model" not in given:
        limits += ["model=small_cnn"] * (not any(part in command for part in NEEDS_RESNET))
    dry = {"strategy.devices=2", "-m"} & {*words} and "sweep=optuna" not in words
    if dry and "dry_run" not in given:
        limits += ["dry_run=true", *[NO_REPORT] * ("-m" in words)]
    return [*words, *limits]


def stands_alone(words):
    """Return whether a command neither reads nor names a run."""
    return words[0] == "train" and not any(w.startswith(("run_dir=", "resume=")) for w in words)


@pytest.fixture(scope="module")
def done_before():
    """Commands that stand alone and have run."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize("commands", [pytest.param(c, id=name) for name, c in blocks().items()])
def test_a_block_runs(commands, world, run, tmp_path, done_before):
    here = [command for command in commands if reason(command) is None]
    folder = tmp_path / "here"
    copy(world, folder)
    if any("run_dir=runs/mine" in command for command in here):
        shutil.rmtree(folder / "runs/mine")
    if any("RUN/exports" in command for command in here):
        (folder / "exports").rename(folder / "RUN/exports")
    for command in here:
        words = tuple(limited(command))
        if words in done_before:
            continue
        done = run(words, folder)
        assert done.code == 0, f"{command}\n{done.out}\n{done.err}"
        if stands_alone(words):
            done_before.add(words)


def test_every_shell_reads_them():
    """Brackets, parentheses and globs stand in quotes: zsh and bash have a use of their own."""
    bare = [
        command
        for commands in blocks().values()
        for command in commands
        if set("[](){}*?") & set(re.sub(r"'[^']*'| \[\w+=\]", "", command))
    ]
    assert bare == []


def test_every_exception_is_on_a_page():
    shown = [command + " " for commands in blocks().values() for command in commands]
    assert [part for part in NOT_HERE if not any(part in command for command in shown)] == []
