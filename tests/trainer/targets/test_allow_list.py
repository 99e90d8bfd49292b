"""What a configuration may name, of all of ours and of the libraries; and known attacks.

These tried to run, read, send or cut something: none gets as far as a call.
"""

import importlib
import re
import sys
import types
from typing import Any

import pytest
import torch

from regimen.conf.errors import ConfigError
from regimen.conf.layout import PACKAGES, ROOT
from regimen.trainer.optimizers.param_groups import parse_selector
from regimen.trainer.targets import allow_list as targets
from regimen.trainer.targets.allow_list import LIBRARIES, TargetError, locate, refusal
from regimen.trainer.targets.instantiate import CheckedNode, instantiate, refused_targets


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Work in an empty folder; what is imported from it, allowed and closed, is forgotten."""
    monkeypatch.setattr(targets, "_extra", [])
    monkeypatch.setattr(targets, "_closed", set())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        place = getattr(sys.modules[name], "__file__", None) or ""
        if place.startswith(str(tmp_path)):
            del sys.modules[name]


def nameable(path):
    try:
        locate(path)
    except TargetError:
        return False
    return True


def named_in_yaml():
    """Return what our YAML files name of ours: pairs of a module and a name."""
    found = set()
    for file in (ROOT / "conf").rglob("*.yaml"):
        text = file.read_text(encoding="utf-8")
        for path in re.findall(r"_target_:\s*([\w.]+)", text):
            if path.startswith("regimen."):
                module, name = path.rsplit(".", 1)
                found.add((module, name))
    return found


def our_modules():
    """Yield the import path of each module of the packages."""
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            path = file.relative_to(ROOT).with_suffix("").as_posix()
            yield "regimen." + path.replace("/", ".")


def test_of_ours_what_yaml_names_and_the_classes_beside_it_can_be_named():
    ours = named_in_yaml()
    with_names = {module for module, _ in ours}
    found = set()
    for module in our_modules():
        if module in with_names:
            names = vars(importlib.import_module(module))
            found |= {(module, name) for name in names if nameable(f"{module}.{name}")}
        else:  # checked by the module's name alone
            assert not nameable(f"{module}.Anything")

    assert ours <= found

    with_classes = {module for module, name in ours if name[0].isupper()}
    for module, name in found - ours:
        thing = getattr(sys.modules[module], name)
        assert isinstance(thing, type), name
        assert not issubclass(thing, BaseException), name
        assert module in with_classes, name
        assert thing.__module__ == module, name
        assert not name.startswith("_"), name


def package_of(path):
    return path.partition(".")[0]


def loaded_modules(packages):
    """Yield the modules of these packages that are imported, by name."""
    for name, module in sorted(sys.modules.items()):
        if package_of(name) in packages and isinstance(module, types.ModuleType):
            yield name, module


def test_what_can_be_named_of_the_libraries_is_public_and_their_own():
    listed = [name for name in LIBRARIES if package_of(name) != "timm"]  # an extra
    for name in listed:
        importlib.import_module(name)
    found = set()
    for name, module in loaded_modules({package_of(name) for name in listed}):
        attributes = [one for one in sorted(vars(module)) if one.isidentifier()]
        if name not in LIBRARIES:  # checked by its name alone: one shows it for all
            attributes = attributes[-1:]
        found |= {(name, one) for one in attributes if nameable(f"{name}.{one}")}

    assert {name for name, _ in found} == set(listed)
    assert len(found) > 600

    for module, name in found:
        thing = getattr(sys.modules[module], name)
        owner = thing.__module__ or ""
        assert not name.startswith("_")
        assert not isinstance(thing, types.ModuleType)
        assert "_deprecated" not in owner
        assert package_of(owner) == package_of(module), (module, name)


def test_of_timm_its_own_optimizers_can_be_named():
    optim = pytest.importorskip("timm.optim")
    found = {name for name in vars(optim) if nameable(f"timm.optim.{name}")}

    assert {"Lamb", "Lars", "Lion", "MADGRAD"} <= found
    for name in found:
        kind = getattr(optim, name)
        assert issubclass(kind, torch.optim.Optimizer), name
        assert kind.__module__.startswith("timm.optim."), name
    assert not {"Lookahead", "Adahessian", "AdamW", "create_optimizer_v2"} & found


def test_the_name_alone_is_looked_at_first():
    paths = "torch.nn.Linear torch.nn.functional.gelu torch.nn.Embedding.from_pretrained"
    paths += " torch.optim.SGD torch.utils.data.default_collate torchvision.models.get_model"
    for path in f"{paths} torchvision.transforms.v2.ColorJitter regimen.models.mlp.MLP".split():
        assert refusal(path) is None
        assert callable(locate(path))

    odd: list[Any] = ["", ".", "torch.nn.", "torch..nn", "a b.c", "torch.nn.__class__", 5, None, []]
    for path in [*odd, "x" * 400]:
        assert "dotted path" in (refusal(path) or "")
    for module in LIBRARIES:
        for name in ("__init__", "_private", "os.system", "sys.modules"):
            assert refusal(f"{module}.{name}")


def test_a_refusal_names_the_key_the_nearest_name_and_the_way_out(folder):
    with pytest.raises(TargetError, match=r"torch\.nn has no 'Linaer'; did you mean Linear"):
        locate("torch.nn.Linaer")
    assert "--allow-target somewhere" in (refusal("somewhere.deep.Net") or "")
    assert "--allow-target transformers`" in (refusal("transformers.AutoModel") or "")

    (folder / "my_networks.py").touch()
    assert "did you mean my_networks.Net?" in (refusal("my_netwroks.Net") or "")
    assert "such as torch.nn.Linear" in (refusal("torch.nn.modules.linear.Linear") or "")

    node = {
        "_target_": "torch.nn.Identity",
        "x": [{"_target_": "os.system"}],
        "y": {"_target_": 3},
    }
    keys = [p.key for p in refused_targets(node, "model")]
    assert keys == ["model.x.0._target_", "model.y._target_"]


def test_packages_of_the_working_folder_may_be_named(folder):
    package = folder / "my_package" / "deep"
    (package / "conf").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    (package / "nets.py").write_text("def build():\n    return 3\n")
    targets.close([str(folder), str(package / "conf")])  # a project that holds its configurations

    assert instantiate({"_target_": "my_package.deep.nets.build"}) == 3
    assert sys.path[-1] == str(folder)

    (folder / "my_broken.py").write_text("import no_such_module_anywhere\n")
    assert refusal("my_broken.Net") is None  # the name is checked without an import
    assert "my_broken" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        locate("my_broken.Net")


@pytest.mark.parametrize(
    ("place", "packages"),
    [
        ("runs/received", []),
        ("runs/received", ["runs", "runs/received"]),
        ("stranger", []),
        ("stranger", ["stranger"]),  # a folder of configurations
        ("mine/stranger", ["mine"]),
    ],
)
def test_no_code_comes_from_folders_that_are_not_packages(folder, place, packages):
    canary = folder / "canary"
    code = f"open({str(canary)!r}, 'w')\nclass Model: ...\n"
    (folder / place).mkdir(parents=True)
    for package in packages:
        (folder / package / "__init__.py").touch()
    (folder / place / "payload.py").write_text(code)
    targets.close([str(folder / "stranger")])
    path = f"{place.replace('/', '.')}.payload.Model"

    assert "not allowed" in (refusal(path) or "")
    with pytest.raises(TargetError, match="not allowed"):
        locate(path)
    assert not canary.exists()


def test_a_package_of_the_user_does_not_open_others(folder):
    (folder / "my_doors.py").write_text(
        "import os, torch\nfrom os import system\nclass Net:\n    def run(self): ...\n"
        "from regimen.data.batch import map_leaves\nfrom torch.nn import Linear\n"
        "from regimen.trainer.files.atomic import AppendLog\nfrom torch.nn.utils import skip_init\n"
    )
    doors = ("os.system", "system", "torch.load", "Net.run")
    for path in (*doors, "map_leaves", "AppendLog", "skip_init"):
        with pytest.raises(TargetError, match="not allowed"):
            instantiate({"_target_": f"my_doors.{path}"})

    made = instantiate({"_target_": "my_doors.Linear", "in_features": 1, "out_features": 2})
    assert made.out_features == 2


def test_the_working_folder_does_not_stand_in_for_what_is_installed(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    monkeypatch.syspath_prepend(str(folder / "elsewhere"))
    for name in ("json", "yaml", "torch", "os", "models", "elsewhere/sneaky_thing"):
        (folder / f"{name}.py").write_text("raise SystemExit('ran')\n")

    for path in ("json.loads", "yaml.load", "os.system", "sneaky_thing.run"):
        assert "not allowed" in (refusal(path) or "")
    assert locate("regimen.models.mlp.MLP").__module__ == "regimen.models.mlp"


def test_allowed_packages_are_those_and_what_is_theirs(folder):
    targets.allow(["json"])

    assert locate("json.loads")("3") == 3
    with pytest.raises(TargetError, match="not allowed"):
        locate("json.decoder.re.compile")
    assert "not allowed" in (refusal("jsonx.loads") or "")
    with pytest.raises(TargetError, match="--allow-target"):
        targets.allow(["../evil"])
    assert targets._extra == ["json"]


# Paths that must not even be imported to be checked, or are refused once they are seen.
PATHS = """
os.system posix.system subprocess.Popen builtins.open builtins.eval builtins.__import__
pathlib.Path.unlink shutil.rmtree importlib.import_module logging.os.system functools.partial
operator.methodcaller pickle.loads yaml.unsafe_load numpy.load joblib.load hydra.utils.instantiate
sklearn.utils.fixes.joblib.load sklearn.datasets.fetch_openml regimen.scripts.train.train
regimen.conf.check.parse regimen.conf.yaml_file.examine tests.conftest.anything
regimen.data.sources.os.system regimen.trainer.runs.directory._git
regimen.trainer.files.atomic.AppendLog regimen.trainer.errors.leave_at_once
regimen.trainer.targets.allow_list.allow data.sources.Digits models.resnet.ResNet
regimen.trainer.checkpoints.reader.read_checkpoint regimen.data.batch.map_leaves
regimen.callbacks.checkpoint.CheckpointStore regimen.callbacks.ema.EMA.load_state_dict
torch.load torch.save torch.hub.load torch.ops.load_library
torch.utils.cpp_extension.load torch.nn.Module.load_state_dict torch.nn.Linear.__subclasses__
torch.nn.Module.register_forward_hook torch.nn.Linear.mro torch.nn.modules.module.torch.os.system
torch.nn.utils._deprecation_utils.lazy_deprecated_import torch.nn.functional.boolean_dispatch
torch.nn.functional.importlib.import_module torch.nn.factory_kwargs torch.nn.NLLLoss2d
torch.optim.swa_utils.update_bn torch.optim.lr_scheduler.partial torch.utils.data.DataLoader
torch.optim.Optimizer.register_optimizer_step_pre_hook torchvision.datasets.LSUN
torchvision.datasets.SBU torchvision.datasets.Kinetics torchvision.datasets.utils.download_url
torchvision.datasets.folder.pil_loader torchvision.models.ResNet18_Weights.DEFAULT.get_state_dict
torchvision.models.get_weight torchvision.io.read_file torchvision.transforms.v2.check_type
torchvision.transforms.v2.ToTensor torchmetrics.text.BERTScore torchmetrics.text.bert.BERTScore
torchmetrics.functional.text.bert._read_csv_from_url torchmetrics.Metric.forward
torchmetrics.image.FrechetInceptionDistance timm.models.create_model
timm.models._helpers.load_checkpoint timm.create_model.__globals__
"""


@pytest.mark.parametrize("path", PATHS.split())
def test_a_path_that_led_out_is_refused(path):
    with pytest.raises(TargetError, match=r"not allowed|does not exist|no package|dotted path"):
        locate(path)


def node(target, **arguments):
    return {"_target_": target, **arguments}


OS = node("os.system", c="COMMAND")
LAZY = node(
    "torch.nn.utils._deprecation_utils.lazy_deprecated_import", _args_=[["system"], "os", "os"]
)
CALLS = [
    node("regimen.data.batch.map_leaves", function=LAZY, value="COMMAND"),
    node("torch.nn.Sequential", _args_=[OS]),
    node("torch.nn.Identity", _recursive_=False, x=node("joblib.load")),
    node("torch.optim.lr_scheduler.LambdaLR", _partial_=True, lr_lambda={**OS, "_partial_": True}),
    node("torchvision.transforms.Lambda", lambd=node("builtins.eval", _partial_=True)),
    node("torch.nn.Identity", _convert_=OS),  # a key of Hydra's
    node("regimen.trainer.files.atomic.AppendLog", path="FILE"),  # would cut it
    node("regimen.trainer.errors.leave_at_once", code=0),
    node("regimen.trainer.runs.directory._git", _args_=["-c", "alias.x=!COMMAND", "x"]),
    node("os.${oc.select:y,system}", command="COMMAND"),
    node("builtins.open", file="FILE", mode="w"),
    node("subprocess.run", args="COMMAND", shell=True),
    node("torch.nn.Identity", x=[[OS]]),
    node(["os.system"], command="COMMAND"),
]


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_no_call_reaches_the_canary(call, tmp_path):
    canary = tmp_path / "canary"
    file = tmp_path / "file"
    file.write_text("whole, without a line's end")

    with pytest.raises(TargetError) as caught:
        instantiate(armed(call, f"touch {canary}", str(file)), _key_="callbacks.x")
    assert caught.value.exit_code == 2
    assert not canary.exists()
    assert file.read_text() == "whole, without a line's end"


def test_the_canaries_would_sing(tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "_extra", ["os.mkdir"])
    instantiate(armed(node("os.mkdir", path="FILE"), "", str(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


def armed(node, command, file):
    if isinstance(node, dict):
        return {key: armed(value, command, file) for key, value in node.items()}
    if isinstance(node, list):
        return [armed(value, command, file) for value in node]
    return node.replace("COMMAND", command).replace("FILE", file) if isinstance(node, str) else node


@pytest.fixture
def timm(monkeypatch):
    """Stand in for timm: `create_model` with its signature, recording that it was called."""
    calls = []

    def create_model(
        model_name, pretrained=0, pretrained_cfg=0, pretrained_cfg_overlay=0, checkpoint_path=0, **_
    ):
        calls.append(model_name)

    create_model.__module__ = "timm.models._factory"
    module = types.ModuleType("timm")
    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", module)
    return calls


EVIL: Any = {"checkpoint_path": "evil.pth"}


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (node("timm.create_model", model_name="x", **EVIL), "checkpoint_path"),
        (node("timm.create_model", _args_=["x", False, None, None, "evil.pth"]), "checkpoint_path"),
        (node("timm.create_model", _args_=["x", True, {"file": "evil.pth"}]), "pretrained_cfg"),
        (node("timm.create_model", model_name="x", cache_dir="evil"), "cache_dir"),
        (node("timm.create_model", _args_=["hf-hub:evil/model"]), "model_name"),
        (node("timm.create_model", model_name="local-dir:/evil"), "model_name"),
        (node("timm.create_model", model_name=node("torch.nn.Identity")), "model_name"),
        (
            node(
                "regimen.models.transformers_adapter.build",
                name="x",
                config={"backbone_kwargs": EVIL},
            ),
            "config.backbone_kwargs.checkpoint_path",
        ),
        (
            node("regimen.models.timm_adapter.build", name="x", num_classes=2, model_kwargs=[EVIL]),
            "model_kwargs.0.checkpoint_path",
        ),
    ],
    ids=range(9),
)
def test_what_unpickles_is_refused_at_any_depth(call, key, timm):
    found = {p.key: p.message for p in CheckedNode(call, "model").problems}
    assert "not allowed here" in found[f"model.{key}"]
    with pytest.raises(TargetError, match="not allowed here"):
        instantiate(node("torch.nn.Sequential", _args_=[call]), _key_="model")
    assert timm == []

    instantiate(node("timm.create_model", model_name="resnet18", drop_rate=0.1))
    assert timm == ["resnet18"]


@pytest.mark.parametrize(
    "text", ["ndim<=" + "9" * 5000, "ndim<=1 or 1", "ndim<=__import__('os')", "ndim<=1.5"]
)
def test_a_comparison_of_dimensions_stays_one(text):
    with pytest.raises(ConfigError, match="neither one of"):
        parse_selector({"kind": text}, "rule")
