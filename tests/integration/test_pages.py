"""What the README and the pages of docs/ show is what there is: commands, code, files, messages.

Commands run block by block, in a folder that has what they name. Their limits are tiny, and the
network is a small one; sweeps and runs over several processes are dry ones. What several pages show
runs once. What cannot run here stands in `NOT_HERE` with its reason.
"""

import csv
import io
import json
import os
import re
import shlex
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from torchvision.io import write_jpeg

from regimen import Classification, Trainer, TrainerOptions, loader
from regimen.conf.check import parse
from regimen.conf.layout import PACKAGES
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.lr_schedulers.build import build_lr_schedule
from regimen.trainer.optimizers.optimizers import build_optimizers
from regimen.trainer.task import Task
from toy_pictures import write_digits

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
README = TEXTS["README.md"]
FENCED = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
OWN = FENCED.findall(README.split("## Add your own")[1].split("\n## ")[0])
COMMAND = (
    r"^(?: {4})?(?:uv run )?"
    r"((?:train|evaluate|predict|regimen(?! \d)|python -m scripts\.\w+) .*)\n"
)
NOT_HERE = {  # by what they begin with, or hold
    "regimen demo": "does not end; tests/integration/test_demo.py",
    "regimen doctor": "tests/scripts/test_doctor.py",
    "regimen new": "tests/integration/test_projects.py",
    "--config-dir conf model=mine": "below, with its files",
    "--config-dir recipes": "tests/integration/test_recipes.py, with its files",
    "run=runs/forecast": "the same",
    "sweep=submitit": "needs SLURM; its local executor: tests/scripts/sweeps/test_clusters.py",
    "sweep=ray": "needs Ray; tests/scripts/sweeps/test_clusters.py",
    "data=cifar10 ": "downloads",
    "experiment=detection data.root": "tests/integration/test_detection.py, with its folders",
    "experiment=chat": "tests/integration/test_language_models.py, with its folders",
    "draw=DRAWN": "the same",
    "--whole": "tests/integration/test_borrowed_base.py, with a base that checkpoints leave out",
    "model.name=DIR": "the same",
    "source=questions.jsonl": "tests/integration/test_language_models.py, with a run of task=chat",
    "task.fresh_batches=true": "needs three batches; tests/trainer/update/test_fresh_batches.py",
    "format=peft": "tests/trainer/export/test_huggingface.py, with a run of transformers",
    "format=huggingface": "the same",
    "experiment=glue": "tests/integration/test_texts.py, with its folders",
    "experiment=tags": "the same",
    "source=new.": "the same",
    "--config-dir examples/airbench/conf": "in the clone; tests/integration/test_projects.py",
    "--config-dir examples/": "in the clone; tests/integration/test_gallery*.py",
    "experiment=resnet18_cifar10 data.root": "downloads",
    "experiment=images_finetune": "downloads; tests/integration/test_finetuning.py, with a file",
}
NEEDS_RESNET = ("unfreeze", "run_dir=runs/base")  # which names its layers, or is fine-tuned
SMALLER = {  # fewer jobs, trials and samples
    "range(0,10)": "range(0,1)",
    "data.fold=0,1,2,3,4": "data.fold=0,1",
    "n_trials=30": "n_trials=2",
    "=1024": "=16",
    "model=resnet18": "model=small_cnn",
    "file:///mnt": "file://mnt",
}
NO_REPORT = "sweep.report=false"
LIMITS = ["debug=fast", "loader.batch_size=8", "loader.eval_batch_size=8", "loader.num_workers=0"]


def blocks():
    """Return the commands that stand below one another, by page and line."""
    found = {}
    for name, text in TEXTS.items():
        page = name.removesuffix(".md")
        for block in re.finditer(f"(?:{COMMAND})+", text, re.M):
            line = text.count("\n", 0, block.start()) + 1
            commands = re.findall(COMMAND, block[0], re.M)
            found[f"{page}-{line}"] = [without_comment(command) for command in commands]
    return found


def without_comment(line):
    return line.partition(" #")[0].strip()


def all_commands():
    commands = []
    for block in blocks().values():
        commands += block
    return commands


def reason(command):
    """Return why a command does not run here, or None."""
    for part, why in NOT_HERE.items():
        if part in command + " ":
            return why
    return None


def write_numbers(path, target, values):
    """Write a table with twelve columns of numbers and a target."""
    names = [f"c{number}" for number in range(12)]
    lines = [[*names, target]]
    for row, value in enumerate(values):
        numbers = [(row * (number + 3)) % 7 for number in range(12)]
        lines.append([*numbers, value])
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def write_masks(folder):
    for split, count in (("train", 10), ("test", 2)):
        images = folder / split / "images"
        masks = folder / split / "masks"
        images.mkdir(parents=True)
        masks.mkdir(parents=True)
        for number in range(count):
            mask = np.full((16, 16), number % 3, np.uint8)
            Image.fromarray(mask * 80).save(images / f"{number}.png")
            Image.fromarray(mask).save(masks / f"{number}.png")


def write_shards(folder, pictures):
    """Write the pictures of each split's folders as a shard, with the folders' names as labels."""
    folder.mkdir()
    for split in ("train", "val", "test"):
        with tarfile.open(folder / f"{split}-000.tar", "w") as shard:
            for path in sorted((pictures / split).rglob("*.png")):
                label = path.parent.name.encode()
                member = tarfile.TarInfo(f"{path.stem}.cls")
                member.size = len(label)
                shard.add(path, path.name)
                shard.addfile(member, io.BytesIO(label))


def tables(place):
    """Write what data=table, tokens, shards and the prompts are read from."""
    write_numbers(place / "houses.csv", "price", range(60))
    write_numbers(place / "TABLES/train.csv", "kind", ["k0", "k1"] * 30)
    (place / "book.txt").write_text("to be or not to be, that is the question. " * 400)
    (place / "prompts.txt").write_text("to be\nor not\n")
    write_masks(place / "MASKS")
    (place / "TOKENS").mkdir()
    tokens = np.arange(20 * 1025, dtype=np.uint16) % 50257
    np.save(place / "TOKENS" / "train.npy", tokens)
    write_shards(place / "SHARDS", place / "DIR")


@pytest.fixture(scope="module")
def run(start):
    """Run a command's words in a folder, to its end."""

    def begin(words, folder):
        program, *arguments = words
        if program == "python":
            program = words[2].removeprefix("scripts.")
            arguments = words[3:]
        elif program == "regimen":
            program, *arguments = arguments
        return start(arguments, folder=folder, command=program).wait(0, 300)

    return begin


@pytest.fixture(scope="module")
def world(run, tmp_path_factory):
    """Make what the pages name: data, pictures, finished runs, a sweep."""
    place = tmp_path_factory.mktemp("world")
    counts = {"train": 30, "val": 10, "test": 10}
    write_digits(place / "DIR", counts, 2, 32, colour=True, named="class{}")
    write_digits(place / "photos", {"": 1}, 3, 32, colour=True)
    write_jpeg(torch.zeros(3, 32, 32, dtype=torch.uint8), str(place / "photos" / "last.jpg"))
    write_digits(place / "NEW_IMAGES", {"": 1}, 3, 32, colour=True)
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
        run(words, place)
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
    command = renamed(command)
    words = [word for word in shlex.split(command) if not word.startswith("[")]
    program = set(words[:2])
    if program & {"predict", "export", "quantize"}:
        return [*words, "overwrite=true"]  # commands of a block are often alternatives
    if words[0] != "train" or "--help" in words:
        return words
    given = {word.partition("=")[0] for word in words}
    limits = [limit for limit in LIMITS if limit.partition("=")[0] not in given]
    takes_any_model = not any(part in command for part in NEEDS_RESNET)
    if "experiment=resnet18" in words and "model" not in given and takes_any_model:
        limits.append("model=small_cnn")
    is_sweep = "-m" in words
    is_dry = is_sweep or "strategy.devices=2" in words
    if is_dry and "sweep=optuna" not in words and "dry_run" not in given:
        limits.append("dry_run=true")
        if is_sweep:
            limits.append(NO_REPORT)
    return [*words, *limits]


@pytest.fixture(scope="module")
def done_before():
    """Commands that neither read nor name a run, and have run."""
    return set()


def renamed(command):
    """Return a command with the names and sizes of what there is here."""
    command = command.replace("<time>", "TIME")
    for large, small in SMALLER.items():
        command = command.replace(large, small)
    command = command.replace("step-00000120", "step-00000002")
    command = command.partition(" > ")[0]
    command = command.replace("out=DIR", "out=OUT")
    command = command.replace("resume=runs/", "model=small_cnn resume=runs/")
    command = command.replace("embeddings:avgpool", "embeddings:pool")  # the small network's
    for folder in ("TOKENS", "TABLES", "SHARDS"):
        plural = folder.lower()
        singular = plural.removesuffix("s")
        if f"data={singular}" in command or f"data={plural}" in command:
            command = command.replace("=DIR", f"={folder}")
    return command


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
        run(words, folder)
        names_a_run = any(word.startswith(("run_dir=", "resume=")) for word in words)
        if words[0] == "train" and not names_a_run:
            done_before.add(words)


def test_every_shell_reads_the_commands():
    """Brackets, parentheses and globs stand in quotes: zsh and bash have a use of their own."""
    for command in all_commands():
        # The pages show words that may be left out as [word=].
        bare = re.sub(r"'[^']*'| \[\w+=\]", "", command)
        assert set(bare).isdisjoint("[](){}*?"), command


def test_every_exception_is_on_a_page():
    shown = [command + " " for command in all_commands()]

    for part in NOT_HERE:
        assert any(part in command for command in shown), part


NOT_COMPOSED = (  # what a page shows within its text: names of the reader, mistakes, parts left out
    "accumulate_grad_batches=4",
    "--config-dir conf",
    "--config-dir my_configs",
    "--config-dir recipes",
    "mine.",
    "-m ",
    "...",
)
# Packages that may not be installed, and an experiment that needs some.
EXTRAS = (
    "experiment=chat",
    "experiment=detection",
    "experiment=glue",
    "experiment=tags",
    "experiment=resnet50_a3",
    "experiment=vit_s16_90",
    "experiment=deit_s",
    "experiment=convnext_t",
    "torchmetrics",
    "timm",
    "transformers",
    "mlflow",
    "wandb",
)


def inline():
    """Return what the texts show after `train` that picks something."""
    found = set()
    for text in TEXTS.values():
        for line in re.findall(r"(?:^|`|&& )train ([^`\n]*=[^`\n]*)", text, re.M):
            for end in ("   ", " #", " ["):
                line = line.partition(end)[0]
            if not any(part in line for part in NOT_COMPOSED):
                found.add(line.strip())
    return sorted(found)


@pytest.mark.parametrize("command", inline())
def test_a_command_composes_and_its_targets_bind(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word for word in shlex.split(command) if word not in ("-m", "--cfg", "job")]
    if "experiment=" not in command:
        words.insert(0, "experiment=resnet18")

    config = parse(compose(words).config)

    if not any(package in command for package in EXTRAS):
        check_targets(config)


def fenced(name, kind):
    """Return the texts of a page's blocks in a language."""
    return [text for language, text in FENCED.findall(TEXTS[name]) if language == kind]


def test_what_the_readme_adds_runs_as_printed(train, tmp_path):
    lines = []
    for kind, text in OWN:
        if kind in ("python", "yaml"):
            name = text.splitlines()[0].removeprefix("# ")  # the first line names the file
            assert re.fullmatch(r"[\w/]+\.(py|yaml)", name), name
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif kind == "bash":
            lines += text.splitlines()
    commands = [without_comment(line) for line in lines if line.strip()]
    assert len(commands) >= 3

    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "train"
        done = train(arguments, folder=tmp_path)
        # The callback of the reader's own prints this line.
        assert ("epoch 10\n" in done.out) == ("Shout" in command)


def test_the_python_snippet_of_the_readme_trains(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = [text for _, text in FENCED.findall(README) if "trainer.fit()" in text]

    exec(compile(snippets[0], "README.md", "exec"), {})

    assert float(capsys.readouterr().out) > 0.85
    assert (tmp_path / "runs/digits/checkpoints/last.pt").exists()


def test_the_python_of_the_page_on_python_trains():
    (code,) = fenced("docs/python.md", "python")
    names = {}

    exec(compile(code, "python.md", "exec"), names)

    assert names["trainer"].metrics["val/r2"] > 0.3


def test_the_callback_of_one_s_own_counts(tmp_path):
    codes = [text for kind, text in FENCED.findall(TEXTS["docs/callbacks.md"]) if kind == "python"]
    (code,) = (text for text in codes if "class ClassShare" in text)
    names = {}
    exec(compile(code, "callbacks.md", "exec"), names)
    model = nn.Linear(2, 2)
    trainer = Trainer(
        model,
        Classification(num_classes=2),
        torch.optim.SGD(model.parameters(), lr=0.1),
        train_loader=loader(torch.ones(20, 2), [0] * 15 + [1] * 5, batch_size=10),
        callbacks=[names["ClassShare"](label=1)],
        options=TrainerOptions(max_epochs=2, gradient_accumulation_steps=2, log_every_n_steps=2),
        run_dir=tmp_path,
    )
    trainer.fit()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    shares = [json.loads(line).get("train/share") for line in lines]
    assert [share for share in shares if share is not None] == [0.25, 0.25]


def test_the_tasks_of_one_s_own_are_some():
    names = {}
    for text in fenced("docs/tasks.md", "python"):
        exec(text, names)

    assert issubclass(names["Cautious"], Task)
    assert issubclass(names["TruncatedBPTT"], Task)


def test_the_yaml_of_optimizers_builds():
    network = nn.ModuleDict(
        {
            "conv1": nn.Conv2d(1, 2, 3),
            "bn1": nn.BatchNorm2d(2),
            "fc": nn.Linear(2, 2),
            "hidden": nn.Linear(2, 2),
        }
    )
    sgd = {"_target_": "torch.optim.SGD", "lr": 0.1, "weight_decay": 0.1}
    shown = [yaml.safe_load(text) for text in fenced("docs/optimization.md", "yaml")]
    whole, rules, several, schedule = shown

    one = build_optimizers(network, whole["optimizer"])
    grouped = build_optimizers(network, {**sgd, **rules})
    two = build_optimizers(network, several["optimizer"])
    schedules = build_lr_schedule(schedule["lr_scheduler"], two, 100, 10).schedules

    assert [group.name for group in one.groups()] == ["default"]
    assert [row.group for row in grouped.table()] == ["no_decay", "head", "default", "frozen"]
    assert [group.name for group in two.groups()] == ["muon", "adamw"]
    assert list(schedules) == ["muon", "adamw"]


def test_the_readme_shows_an_experiment_whole():
    assert (ROOT / "conf/experiment/resnet18.yaml").read_text() in README


def test_the_readme_shows_the_steps_of_the_dockerfile():
    text = (ROOT / "Dockerfile").read_text()

    steps = []
    for step in re.findall(r"^RUN (.*)$", text, re.M):
        if not step.startswith("useradd"):
            step = step.replace(" --no-cache-dir", "").replace(" --no-cache", "")
            steps.append(step.replace("$TORCH_BACKEND", "cpu"))
    assert len(steps) == 2
    for step in steps:
        assert step in README
    assert re.search(r"^USER (?!root)\w+$", text, re.M)  # and nothing after it is for root


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem) for p in PAGES])
def test_links_lead_somewhere_and_files_that_are_named_exist(path):
    text = TEXTS[path.relative_to(ROOT).as_posix()]

    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    tests = re.findall(r"(?:^|[ `])(tests/[\w/]+\.py)", text, re.M)
    groups = "task|data|transforms|trainer|model|optimizer|lr_scheduler|callbacks"
    configs = re.findall(rf"`((?:{groups})/[\w/]+\.yaml)`", text)

    assert [link for link in links if not (path.parent / link).exists()] == []
    assert [name for name in tests if not (ROOT / name).is_file()] == []
    assert [name for name in configs if not (ROOT / "conf" / name).is_file()] == []


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem) for p in PAGES[1:]])
def test_lines_of_prose_have_at_most_100_characters(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    tables_and_code = ("|", "    ", "![")
    lines = [line for line in text.splitlines() if not line.startswith(tables_and_code)]
    assert [line for line in lines if len(line) > 100] == []


def test_the_site_lists_every_page():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    listed = re.findall(r"[\w/]+\.md", yaml.dump(site["nav"]))

    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(pages)


def test_the_messages_are_those_of_the_code():
    sources = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            sources.append(path.read_text(encoding="utf-8"))
    # Literals next to each other are one text.
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))

    shown = re.findall(r"^\| `([^`]+)` \|", TEXTS["docs/troubleshooting.md"], re.M)

    assert len(shown) > 20
    assert [message for message in shown if message not in text] == []


# Run in the notebook's kernel behind its last cell.
CHECKED = """
assert [epoch for epoch, _ in curve] == [1, 2, 3, 4]
assert trainer.metrics["val/accuracy"] > 0.85
assert sum(count for _, count in mistakes) == int(wrong.sum()) < 60
assert trainer.state.micro_batches == 2 * trainer.state.updates
assert (stopped.state.global_step, stopped.state.position) == (30, 8)
assert resumed.state.epoch == 6
assert sum(int(row["prediction"]) == label for row, label in zip(rows, labels[1400:1408])) >= 6
assert 0.5 < from_yaml.metrics["val/accuracy"] <= 1
"""


@pytest.mark.slow  # a kernel of Jupyter's imports torch anew
def test_the_notebook_runs_in_a_kernel(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(DOCS / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        assert not cell.outputs
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKED))

    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()

    (resumed,) = [cell for cell in cells if 'fit(resume="auto")' in cell.source]
    assert resumed.outputs[-1]["data"]["text/plain"] == "True"  # the same bits
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
