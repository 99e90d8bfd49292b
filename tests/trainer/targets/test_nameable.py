"""Everything that a configuration can name, listed; and that nothing else can be."""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import trainer
from trainer.targets.allow_list import TargetError, locate
from trainer.targets.nameable import LIBRARIES, OFFERS

ROOT = Path(trainer.__file__).parent.parent
PACKAGES = ("callbacks", "conf", "data", "models", "scripts", "trainer")

OURS = """
callbacks.overfit Overfit
callbacks.pictures.classes ConfusionMatrix PRCurves
callbacks.pictures.generated GeneratedImages GeneratedText
callbacks.pictures.graph Graph
callbacks.pictures.layers LayerStatistics
callbacks.pictures.masks Masks
callbacks.pictures.samples Misclassified TrainingSamples ValidationSamples
callbacks.pictures.texts Texts
callbacks.whitening Whitening
data.formats.huggingface huggingface
data.formats.huggingface_stream streamed
data.formats.shards tar_shards
data.formats.table table
data.formats.tokens token_blocks
models.airbench Airbench
models.transformers_adapter build
callbacks.checkpoint Checkpoint
callbacks.compression.pruning Pruning
callbacks.compression.qat QuantizationAwareTraining
callbacks.early_stopping EarlyStopping
callbacks.ema EMA
callbacks.histograms Histograms
callbacks.lr_finder LRFinder
callbacks.lr_monitor LRMonitor
callbacks.memory Memory
callbacks.model_summary ModelSummary
callbacks.profiler Profiler
callbacks.progress Progress
callbacks.state_dump StateDump
callbacks.swa SWA
callbacks.tensorboard TensorBoard
callbacks.throughput Throughput
callbacks.trackers.csv CSV
callbacks.trackers.mlflow MLflow
callbacks.trackers.wandb WandB
callbacks.trial Trial
callbacks.unfreeze Unfreeze
data.batch_transforms ColorJitter RandomAffine RandomCrop RandomErasing RandomHorizontalFlip
data.batch_transforms AlternatingFlip RandomResizedCrop RandomVerticalFlip
data.image_folder ImageFiles ImageFolder image_folder
data.noise WithNoise
data.orders ClassBalanced FirstOf LowMemory Sequential Shuffled Subset Weighted
data.samplers PerClass
data.scenes DigitScenes
data.sources Cifar10 Digits FashionMnist
data.streams Stream
data.tabular Diabetes
data.text StandardLibraryText
data.transforms Mirrored ProgressiveResize Shifted StackViews Standardize ToFloat
models.gan Discriminator GAN Generator
models.gpt GPT
models.mlp MLP
models.pretrained fine_tune
models.resnet BasicBlock Bottleneck ResNet
models.sequential from_layers
models.small_cnn SmallCNN
models.timm_adapter build
models.torchvision_adapter build
models.transformer Attention Block FeedForward
models.unet UNet
models.vit ViT
trainer.tasks.metrics ConfusionMatrix MacroF1 MeanIoU PerClassAccuracy
trainer.tasks.losses Losses Term vector
trainer.optimizers.muon Muon
trainer.tasks.penalties GradientPenalty
trainer.tasks.metrics MicroF1 Perplexity R2 Running
trainer.tasks.classification Classification
trainer.tasks.gan GAN
trainer.tasks.language_model LanguageModel
trainer.tasks.multilabel MultiLabel
trainer.tasks.own_loss OwnLoss
trainer.tasks.regression Regression
trainer.tasks.segmentation Segmentation
"""


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module's top level binds, those that it imports included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name).partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def nameable(path: str) -> bool:
    try:
        locate(path)
    except TargetError:
        return False
    return True


def test_what_can_be_named_of_ours_is_this_list() -> None:
    found = set()
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            module = ".".join(part for part in parts if part != "__init__")
            names = names_in(ast.parse(file.read_text(encoding="utf-8")))
            # What is not listed is checked by the module's name alone.
            tried = sorted(set(names))[: None if module in OFFERS else 1]
            found |= {f"{module}.{name}" for name in tried if nameable(f"{module}.{name}")}
    expected = {
        f"{module}.{name}"
        for module, *names in map(str.split, OURS.strip().splitlines())
        for name in names
    }
    assert found == expected


def test_what_is_listed_of_ours_exists() -> None:
    for module in set(OFFERS) - set(LIBRARIES):
        assert any(line.startswith(f"{module} ") for line in OURS.splitlines()), module


def test_what_can_be_named_of_the_libraries_is_public_and_their_own() -> None:
    listed = [name for name in LIBRARIES if name != "timm"]
    for name in listed:
        importlib.import_module(name)
    roots = {name.partition(".")[0] for name in listed}
    found: dict[str, list[str]] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] not in roots or not isinstance(module, ModuleType):
            continue
        names = [name for name in sorted(vars(module)) if name.isidentifier()]
        if (
            module_name not in LIBRARIES
        ):  # checked by the module name alone: one name shows it for all
            names = names[-1:]
        if offered := [name for name in names if nameable(f"{module_name}.{name}")]:
            found[module_name] = offered
    assert set(found) == set(listed)
    for module_name, names in found.items():
        for name in names:
            thing = getattr(sys.modules[module_name], name)
            assert not name.startswith("_")
            assert not isinstance(thing, ModuleType)
            assert "_deprecated" not in (thing.__module__ or "")
            owner = thing.__module__ or ""
            package = module_name.partition(".")[0]
            assert owner.partition(".")[0] == package, (module_name, name, owner)
    assert sum(map(len, found.values())) > 600


@pytest.mark.parametrize("module", sorted(LIBRARIES))
def test_a_module_offers_no_module_and_nothing_private(module: str) -> None:
    for name in ("__init__", "_private", "os.system", "sys.modules", "__class__"):
        assert not nameable(f"{module}.{name}")
