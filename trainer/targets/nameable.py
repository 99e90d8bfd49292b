"""The allow-list: what a `_target_` may name of Regimen and of the libraries.

A module that is not listed offers nothing. A listed one offers the kinds of objects listed for it,
so a new file cannot be named until it is added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """What may be named in a listed module, as `module.Name`."""

    inside: str  # the package or module in which the objects must be defined
    classes: bool = True
    functions: bool | tuple[str, ...] = False  # all that are documented, or these
    only: tuple[str, ...] = ()  # these names; (): all that the module documents
    without: tuple[str, ...] = ()  # patterns of names
    constructors: tuple[str, ...] = ()  # class methods, as `Class.method`
    compiled: tuple[str, ...] = ()  # `__module__` of its compiled functions


def _ours(module: str, *functions: str, classes: bool = True) -> tuple[str, Offer]:
    return module, Offer(inside=module, classes=classes, functions=functions)


def _metrics(part: str = "", *only: str) -> tuple[str, Offer]:
    return f"torchmetrics{part}", Offer("torchmetrics", only=only)


def _networks(package: str) -> Offer:
    # `Weights` would accept any URL; the builders accept only known names.
    without = ("*Weights*", "get_model_*", "get_weight", "list_models")
    return Offer(package, functions=True, without=without)


LIBRARIES: Mapping[str, Offer] = {
    "torch.nn": Offer(
        "torch.nn", constructors=("Embedding.from_pretrained", "EmbeddingBag.from_pretrained")
    ),
    "torch.nn.functional": Offer(
        "torch.nn.functional",
        classes=False,
        functions=True,
        without=("upsample", "upsample_bilinear", "upsample_nearest"),  # deprecated
        compiled=("torch", "torch._C._nn"),
    ),
    "torch.nn.utils.parametrizations": Offer(
        "torch.nn.utils.parametrizations", classes=False, functions=True
    ),
    "torch.optim": Offer("torch.optim"),
    "torch.optim.lr_scheduler": Offer("torch.optim.lr_scheduler"),
    "torch.optim.swa_utils": Offer("torch.optim.swa_utils", only=("SWALR",)),
    "torch.utils.data": Offer(
        "torch.utils.data",
        functions=True,
        only=(
            "BatchSampler",
            "ChainDataset",
            "ConcatDataset",
            "DistributedSampler",
            "RandomSampler",
            "Sampler",
            "SequentialSampler",
            "StackDataset",
            "Subset",
            "SubsetRandomSampler",
            "TensorDataset",
            "WeightedRandomSampler",
            "default_collate",
            "default_convert",
        ),
    ),
    "torchvision.transforms": Offer("torchvision.transforms"),
    "torchvision.transforms.v2": Offer("torchvision.transforms"),
    "torchvision.models": _networks("torchvision.models"),
    "torchvision.models.detection": _networks("torchvision.models.detection"),
    "torchvision.models.segmentation": _networks("torchvision.models.segmentation"),
    "torchvision.models.video": _networks("torchvision.models.video"),
    "torchvision.ops": Offer("torchvision.ops", functions=True),
    # LSUN unpickles a file beside the data; the other two fetch URLs listed in a file.
    "torchvision.datasets": Offer(
        "torchvision.datasets", without=("Kinetics", "LSUN", "LSUNClass", "SBU")
    ),
    **dict(
        (
            _metrics(),
            _metrics(".classification"),
            _metrics(".clustering"),
            _metrics(".nominal"),
            _metrics(".regression"),
            _metrics(".retrieval"),
            _metrics(".segmentation"),
            _metrics(".wrappers"),
            # The other metrics of these three modules download networks, some of them pickled.
            _metrics(
                ".audio",
                "ComplexScaleInvariantSignalNoiseRatio",
                "PermutationInvariantTraining",
                "ScaleInvariantSignalDistortionRatio",
                "ScaleInvariantSignalNoiseRatio",
                "SignalDistortionRatio",
                "SignalNoiseRatio",
                "SourceAggregatedSignalDistortionRatio",
            ),
            _metrics(
                ".image",
                "ErrorRelativeGlobalDimensionlessSynthesis",
                "MultiScaleStructuralSimilarityIndexMeasure",
                "PeakSignalNoiseRatio",
                "PeakSignalNoiseRatioWithBlockedEffect",
                "RelativeAverageSpectralError",
                "RootMeanSquaredErrorUsingSlidingWindow",
                "SpatialCorrelationCoefficient",
                "SpectralAngleMapper",
                "SpectralDistortionIndex",
                "StructuralSimilarityIndexMeasure",
                "TotalVariation",
                "UniversalImageQualityIndex",
                "VisualInformationFidelity",
            ),
            _metrics(
                ".text",
                "BLEUScore",
                "CHRFScore",
                "CharErrorRate",
                "EditDistance",
                "ExtendedEditDistance",
                "MatchErrorRate",
                "Perplexity",
                "SQuAD",
                "TranslationEditRate",
                "WordErrorRate",
                "WordInfoLost",
                "WordInfoPreserved",
            ),
        )
    ),
    "timm": Offer("timm", classes=False, functions=("create_model",), only=("create_model",)),
}
OURS: Mapping[str, Offer] = dict(
    (
        _ours("callbacks.checkpoint"),
        _ours("callbacks.compression.pruning"),
        _ours("callbacks.compression.qat"),
        _ours("callbacks.early_stopping"),
        _ours("callbacks.ema"),
        _ours("callbacks.histograms"),
        _ours("callbacks.lr_finder"),
        _ours("callbacks.lr_monitor"),
        _ours("callbacks.memory"),
        _ours("callbacks.model_summary"),
        _ours("callbacks.overfit"),
        _ours("callbacks.pictures.classes"),
        _ours("callbacks.pictures.generated"),
        _ours("callbacks.pictures.graph"),
        _ours("callbacks.pictures.layers"),
        _ours("callbacks.pictures.masks"),
        _ours("callbacks.pictures.samples"),
        _ours("callbacks.pictures.texts"),
        _ours("callbacks.profiler"),
        _ours("callbacks.progress"),
        _ours("callbacks.state_dump"),
        _ours("callbacks.swa"),
        _ours("callbacks.tensorboard"),
        _ours("callbacks.throughput"),
        _ours("callbacks.trackers.csv"),
        _ours("callbacks.trackers.mlflow"),
        _ours("callbacks.trackers.wandb"),
        _ours("callbacks.trial"),
        _ours("callbacks.unfreeze"),
        _ours("callbacks.whitening"),
        _ours("data.batch_transforms"),
        _ours("data.formats.huggingface", "huggingface", classes=False),
        _ours("data.formats.huggingface_stream", "streamed", classes=False),
        _ours("data.formats.shards", "tar_shards", classes=False),
        _ours("data.formats.table", "table", classes=False),
        _ours("data.formats.tokens", "token_blocks", classes=False),
        _ours("data.image_folder", "image_folder"),
        _ours("data.noise"),
        ("data.orders", Offer("data.orders", without=("Permut*",))),
        ("data.samplers", Offer("data.samplers", only=("PerClass",))),
        _ours("data.scenes"),
        _ours("data.sources"),
        _ours("data.streams"),
        _ours("data.tabular"),
        ("data.text", Offer("data.text", only=("StandardLibraryText",))),
        (
            "data.transforms",
            Offer(
                "data.transforms",
                only=(
                    "Mirrored",
                    "ProgressiveResize",
                    "Shifted",
                    "StackViews",
                    "Standardize",
                    "ToFloat",
                ),
            ),
        ),
        _ours("models.airbench"),
        _ours("models.gan"),
        _ours("models.gpt"),
        _ours("models.mlp"),
        _ours("models.pretrained", "fine_tune", classes=False),
        _ours("models.resnet"),
        _ours("models.sequential", "from_layers"),
        _ours("models.small_cnn"),
        _ours("models.timm_adapter", "build"),
        _ours("models.torchvision_adapter", "build"),
        _ours("models.transformer"),
        _ours("models.transformers_adapter", "build", classes=False),
        _ours("models.unet"),
        _ours("models.vit"),
        _ours("trainer.tasks.losses", "vector"),
        _ours("trainer.optimizers.muon"),
        _ours("trainer.tasks.penalties"),
        _ours("trainer.tasks.metrics"),
        _ours("trainer.tasks.classification"),
        _ours("trainer.tasks.gan"),
        _ours("trainer.tasks.language_model"),
        _ours("trainer.tasks.multilabel"),
        _ours("trainer.tasks.own_loss"),
        _ours("trainer.tasks.regression"),
        _ours("trainer.tasks.segmentation"),
    )
)
OFFERS: Mapping[str, Offer] = {**LIBRARIES, **OURS}
