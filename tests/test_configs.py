"""Every YAML file that is shipped: it opens with its command, composes, and its targets bind."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from regimen.conf.check import parse
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.check import check_targets

CONF = Path(__file__).resolve().parents[1] / "conf"
FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
BASE = "resnet18"  # the experiment that a file of another group is tried in
TINY_BERT = ["model.name=bert", "model.config={hidden_size: 24}"]
TINY_LLAMA = ["model.name=llama", "model.config={hidden_size: 64, num_hidden_layers: 1}"]
# What a person has to give with a file, because it has no sensible default.
GIVEN = {
    "data=chat": ["data.root=chats", "data.tokenizer=llama"],
    "data=detection": ["data.root=images"],
    "data=gpt2_tokens": ["data.root=tokens"],
    "data=huggingface": ["data.path=images"],
    "data=huggingface_stream": ["data.path=x", "data.train_length=9", "data.val_length=9"],
    "data=image_folder": ["data.root=images"],
    "data=mask_folder": ["data.root=images", "data.num_classes=3"],
    "data=shards": ["data.root=images"],
    "data=table": ["data.path=t.csv", "data.target=price", "data.channels=3"],
    "data=tagged_words": ["data.root=words"],
    "data=texts": ["data.root=texts"],
    "data=tokens": ["data.root=book.txt"],
    "model=lora": TINY_LLAMA,
    "model=transformers": TINY_BERT,
    "data=cifar10_folder": ["data.root=images"],
    "experiment=chat": ["data.root=chats", *TINY_LLAMA],
    "experiment=detection": ["data.root=images"],
    "experiment=convnext_t": ["data.root=images"],
    "experiment=deit_s": ["data.root=images"],
    "experiment=gpt2_124m": ["data.root=tokens"],
    "experiment=images": ["data.root=images"],
    "experiment=images_finetune": ["data.root=images"],
    "experiment=resnet50_a3": ["data.root=images"],
    "experiment=resnet50_v2": ["data.root=images"],
    "experiment=vit_s16_90": ["data.root=images"],
    "callbacks=mirror": ["callbacks.mirror.to=file:///copy"],
    "task/metrics=answers": ["task.generate.max_new_tokens=8"],
    "model=finetune": ["model.weights=weights.pt"],
    "optimizer/param_groups=layer_decay": ["model=vit_tiny"],
    "model=vit_s16": ["data.image_size=32"],
    "experiment=glue": ["data.root=texts", *TINY_BERT],
    "experiment=tags": ["data.root=words", *TINY_BERT],
    "optimizer=several": ["+optimizer.optimizers.all={_target_: torch.optim.SGD, lr: 0.1}"],
}
# Options that belong to a model of their own, and the experiment that has it.
HOMES = {"optimizer=gan": "gan", "task=gan": "gan", "task/metrics=answers": "chat"}
# Packages that an option needs and the project does not bring.
EXTRA = {
    "experiment=chat": "peft",
    "model=lora": "peft",
    "callbacks=mlflow": "mlflow",
    "callbacks=wandb": "wandb",
    "experiment=convnext_t": "timm",
    "experiment=deit_s": "timm",
    "experiment=resnet50_a3": "timm",
    "experiment=vit_s16_90": "timm",
    "model=convnext_t": "timm",
    "model=deit_s": "timm",
    "model=timm": "timm",
    "experiment=glue": "transformers",
    "experiment=tags": "seqeval",
    "task=token_classification": "seqeval",
    "model=timm_resnet50": "timm",
    "model=transformers": "transformers",
    "optimizer=lamb": "timm",
    "task/metrics=answers": "rouge_score",
    "task/metrics=torchmetrics": "torchmetrics",
    "transforms=deit": "timm",
    "transforms=resnet50_a3": "timm",
    "transforms=vit_s16": "timm",
}
# The groups whose alternatives go with every experiment.
FREE = "model data optimizer lr_scheduler transforms strategy callbacks debug"
# Paths that users' YAML and Python name: a class stays in its file, whatever is merged around it.
PROMISED = """
regimen.callbacks.pictures.graph.Graph regimen.callbacks.pictures.layers.LayerStatistics
regimen.callbacks.pictures.masks.Masks regimen.callbacks.pictures.texts.Texts
regimen.data.noise.WithNoise regimen.data.scenes.DigitScenes regimen.data.tabular.Diabetes
regimen.data.samplers.PerClass
regimen.data.formats.huggingface_stream.streamed regimen.models.timm_adapter.build
regimen.models.torchvision_adapter.build regimen.models.transformers_adapter.build
regimen.trainer.trainer.Trainer regimen.trainer.Trainer regimen.trainer.inference.run.load_run
regimen.trainer.callback.Callback regimen.trainer.task.Task regimen.trainer.task.StepOutput
regimen.scripts.composition.compose.compose regimen.Trainer regimen.TrainerOptions regimen.Callback
regimen.Task regimen.StepOutput regimen.load_run regimen.compose regimen.build
regimen.loader regimen.Checkpoint regimen.Classification regimen.Regression
"""


def options(group):
    return [path.stem for path in FILES if path.parent.as_posix() == group]


def picked(group, option):
    """Return the overrides that pick an option of a group."""
    value = f"[default,{option}]" if group == "callbacks" and option != "default" else option
    plus = "+" * group.startswith("loader/")  # which no file chooses
    return [f"{plus}{group}={value}", *GIVEN.get(f"{group}={option}", [])]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_opens_with_the_command_that_uses_it(path):
    first = (CONF / path).read_text(encoding="utf-8").partition("\n")[0]
    assert re.match(r"# ((uv )?pip install \S+ && )?(train|evaluate|python -m) ", first)


@pytest.mark.parametrize(
    ("group", "option"), [(p.parent.as_posix(), p.stem) for p in FILES if p.parent != Path()]
)
def test_an_option_composes_and_its_targets_bind(group, option):
    if f"{group}={option}" in EXTRA:
        pytest.importorskip(EXTRA[f"{group}={option}"])
    home = HOMES.get(f"{group}={option}", BASE)
    base = [] if group == "experiment" else picked("experiment", home)
    composed = compose([*base, *picked(group, option)])
    check_targets(parse(composed.config))


@pytest.mark.parametrize("experiment", options("experiment"))
def test_an_experiment_goes_with_every_alternative(experiment):
    """One from each group at a time, until every option had its turn."""
    choices = {group: options(group) for group in FREE.split()}
    # Callbacks are many, and know little of the rest: each experiment meets some of them.
    turns = max(len(names) for group, names in choices.items() if group != "callbacks")
    first = turns * options("experiment").index(experiment)
    for turn in range(first, first + turns):
        line = picked("experiment", experiment)
        for group, names in choices.items():
            line += picked(group, names[turn % len(names)])
        parse(compose(line).config)


@pytest.mark.parametrize("path", PROMISED.split())
def test_a_promised_path_stays(path):
    module, _, name = path.rpartition(".")
    assert getattr(import_module(module), name).__module__.startswith(module)
