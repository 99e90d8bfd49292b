"""Configurations that tried to run, read, send or cut something: none gets as far as a call."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from trainer.optimizers.param_groups import ParamGroupError, parse_selector
from trainer.targets import allow_list
from trainer.targets.allow_list import TargetError, locate
from trainer.targets.instantiate import instantiate, node_problems

# Paths that must not even be imported to be checked, or are refused once they are seen. All that
# can be named of ours and of the libraries is walked by test_allow_list.py.
PATHS = """
os.system posix.system subprocess.Popen builtins.open builtins.eval builtins.__import__
pathlib.Path.unlink shutil.rmtree importlib.import_module logging.os.system functools.partial
operator.methodcaller pickle.loads yaml.unsafe_load numpy.load joblib.load hydra.utils.instantiate
sklearn.utils.fixes.joblib.load sklearn.datasets.fetch_openml scripts.train.train conf.check.parse
conf.yaml_file.examine tests.conftest.anything data.sources.os.system trainer.runs.directory._git
trainer.files.atomic.AppendLog trainer.errors.leave_at_once trainer.targets.allow_list.allow
trainer.checkpoints.reader.read_checkpoint data.batch.map_leaves
callbacks.checkpoint.CheckpointStore callbacks.ema.EMA.load_state_dict
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
def test_a_path_that_led_out_is_refused(path: str) -> None:
    with pytest.raises(TargetError, match=r"not allowed|does not exist|no package|dotted path"):
        locate(path)


def node(target, **arguments):
    return {"_target_": target, **arguments}


OS = node("os.system", c="COMMAND")
LAZY = node(
    "torch.nn.utils._deprecation_utils.lazy_deprecated_import", _args_=[["system"], "os", "os"]
)
CALLS = [
    node("data.batch.map_leaves", function=LAZY, value="COMMAND"),
    node("torch.nn.Sequential", _args_=[OS]),
    node("torch.nn.Identity", _recursive_=False, x=node("joblib.load")),
    node("torch.optim.lr_scheduler.LambdaLR", _partial_=True, lr_lambda={**OS, "_partial_": True}),
    node("torchvision.transforms.Lambda", lambd=node("builtins.eval", _partial_=True)),
    node("torch.nn.Identity", _convert_=OS),  # a key of Hydra's
    node("trainer.files.atomic.AppendLog", path="FILE"),  # would cut it
    node("trainer.errors.leave_at_once", code=0),
    node("trainer.runs.directory._git", _args_=["-c", "alias.x=!COMMAND", "x"]),
    node("os.${oc.select:y,system}", command="COMMAND"),
    node("builtins.open", file="FILE", mode="w"),
    node("subprocess.run", args="COMMAND", shell=True),
    node("torch.nn.Identity", x=[[OS]]),
    node(["os.system"], command="COMMAND"),
]


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_no_call_reaches_the_canary(call: dict[str, Any], tmp_path: Path) -> None:
    canary, file = tmp_path / "canary", tmp_path / "file"
    file.write_text("whole, without a line's end")
    with pytest.raises(TargetError) as caught:
        instantiate(armed(call, f"touch {canary}", str(file)), _key_="callbacks.x")
    assert caught.value.exit_code == 2
    assert not canary.exists()
    assert file.read_text() == "whole, without a line's end"


def test_the_canaries_would_sing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allow_list, "_extra", ["os.mkdir"])
    instantiate(armed(node("os.mkdir", path="FILE"), "", str(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


def armed(node: Any, command: str, file: str) -> Any:
    if isinstance(node, dict):
        return {key: armed(value, command, file) for key, value in node.items()}
    if isinstance(node, list):
        return [armed(value, command, file) for value in node]
    return node.replace("COMMAND", command).replace("FILE", file) if isinstance(node, str) else node


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for timm: `create_model` with its signature, recording that it was called."""
    calls = []

    def create_model(
        model_name,
        pretrained=0,
        pretrained_cfg=0,
        pretrained_cfg_overlay=0,
        checkpoint_path="",
        **rest,
    ) -> None:
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
            node("models.transformers_adapter.build", name="x", config={"backbone_kwargs": EVIL}),
            "config.backbone_kwargs.checkpoint_path",
        ),
        (
            node("models.timm_adapter.build", name="x", num_classes=2, model_kwargs=[EVIL]),
            "model_kwargs.0.checkpoint_path",
        ),
    ],
    ids=range(9),
)
def test_what_unpickles_is_refused_at_any_depth(call, key: str, timm: list[str]) -> None:
    found = {p.key: p.message for p in node_problems(call, "model")}
    assert "not allowed here" in found[f"model.{key}"]
    with pytest.raises(TargetError, match="not allowed here"):
        instantiate(node("torch.nn.Sequential", _args_=[call]), _key_="model")
    assert timm == []
    instantiate(node("timm.create_model", model_name="resnet18", drop_rate=0.1))
    assert timm == ["resnet18"]


@pytest.mark.parametrize(
    "text", ["ndim<=" + "9" * 5000, "ndim<=1 or 1", "ndim<=__import__('os')", "ndim<=1.5"]
)
def test_a_comparison_of_dimensions_stays_one(text: str) -> None:
    with pytest.raises(ParamGroupError, match="neither one of"):
        parse_selector({"kind": text}, "rule")
