"""Broken configurations, each of which names its key and the way out (I9)."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from conf.check import parse
from conf.errors import ConfigError
from scripts.composition.compose import compose
from trainer.build.check import check_targets


def mistakes(*argv: str) -> ConfigError:
    """Return the error that a command line ends in, before data are read or anything is built."""
    with pytest.raises(ConfigError) as caught:
        check_targets(parse(compose(["experiment=resnet18", *argv]).config))
    return caught.value


@dataclass(frozen=True)
class Case:
    overrides: list[str]
    key: str
    texts: tuple[str, ...]


def case(overrides: str, key: str, *texts: str) -> Case:
    return Case(overrides.split(" "), key, texts)


def rounds(cases: list[Case]) -> list[list[Case]]:
    """Share cases out so that a round has one for each key; all are reported together."""
    found: list[list[Case]] = []
    for one in cases:
        free = [r for r in found if all(one.key != other.key for other in r)]
        if free:
            free[0].append(one)
        else:
            found.append([one])
    return found


# Found whatever else is wrong.
KEYS_AND_TYPES = [
    case("lrr=1", "lrr", "unknown key"),
    case("sed=1", "sed", "did you mean seed?"),
    case("+foo=1", "foo", "unknown key"),
    case("+foo.bar.baz=1", "foo", "unknown key"),
    case("seed=-1", "seed", ">= 0", "-1"),
    case("seed=1.5", "seed", "an integer", "1.5"),
    case("seed=4294967296", "seed", "<= 4294967295"),
    case("seed=true", "seed", "an integer", "true"),
    case("name=../x", "name", "plain folder name"),
    case("name=/abs", "name", "plain folder name"),
    case("name=a/b", "name", "plain folder name"),
    case("name=..", "name", "plain folder name"),
    case("name=" + "n" * 300, "name", "100 bytes"),
    case("name=", "name", "plain folder name"),
    case("name=7", "name", "text", "quote it"),
    case("resume_policy=ask", "resume_policy", "error, keep, override"),
    case("dry_run=maybe", "dry_run", "true or false"),
    case("run_dir=3", "run_dir", "text"),
    case("model=resnet19", "model", "did you mean resnet18?", "small_cnn"),
    case("model=../../../secret", "model", "choose of", "resnet18"),
    case("model=/etc/passwd", "model", "choose of"),
    case("data=cifar11", "data", "did you mean cifar10?"),
    case("data.num_classes=0", "data.num_classes", ">= 1"),
    case("data.on_error=ignore", "data.on_error", "raise or skip"),
    case("data.max_skipped=-1", "data.max_skipped", ">= 0"),
    case("transforms=crop", "transforms", "choose of", "crop_flip"),
    case("transforms.train=3", "transforms.train", "section"),
    case("transforms.eval.to_float=yes", "transforms.eval.to_float", "section"),
    case("loader.batchsize=3", "loader.batchsize", "did you mean loader.batch_size?"),
    case("loader.batch_size=0", "loader.batch_size", ">= 1"),
    case("loader.batch_size=1.5", "loader.batch_size", "an integer"),
    case("loader.batch_size=010", "loader.batch_size", "an integer", "'010'"),
    case("loader.num_workers=-1", "loader.num_workers", ">= 0"),
    case("loader.pin_memory=on_gpu", "loader.pin_memory", "true or false"),
    case("loader.multiprocessing_context=thread", "loader.multiprocessing_context", "spawn"),
    case("loader.eval.num_worker=1", "loader.eval.num_worker", "did you mean loader.eval.num_w"),
    case("loader.sampler={a:1}", "loader.sampler._target_", "missing"),
    case("task=clasification", "task", "did you mean classification?"),
    case("optimizer=sdg", "optimizer", "did you mean sgd?"),
    case("optimizer.lr=abc", "optimizer.lr", "a number", "'abc'"),
    case("optimizer.lr=-0.1", "optimizer.lr", ">= 0", "-0.1"),
    case("optimizer.lr=nan", "optimizer.lr", "nan"),
    case("optimizer.lr=inf", "optimizer.lr", "inf"),
    case("optimizer.lr=", "optimizer.lr", "a number"),
    case("optimizer.weight_decay=-1", "optimizer.weight_decay", ">= 0"),
    case("optimizer.weight_decay=nan", "optimizer.weight_decay", "nan"),
    case("lr_scheduler=cosin", "lr_scheduler", "did you mean cosine?"),
    case("lr_scheduler.interval=batch", "lr_scheduler.interval", "step or epoch"),
    case("trainer.max_epoch=1", "trainer.max_epoch", "did you mean trainer.max_epochs?"),
    case("trainer.max_epochs=1.5", "trainer.max_epochs", "an integer"),
    case("trainer.max_epochs=-1", "trainer.max_epochs", ">= 1"),
    case("trainer.max_time=1h", "trainer.max_time", "hours:minutes:seconds"),
    case("trainer.precision=bf61", "trainer.precision", "did you mean bf16?"),
    case("trainer.gradient_accumulation_steps=0", "trainer.gradient_accumulation_steps", ">= 1"),
    case("trainer.clip_grad_norm=-1", "trainer.clip_grad_norm", "> 0"),
    case("trainer.limit_train_batches=1.5", "trainer.limit_train_batches", "fraction"),
    case("trainer.activation_checkpointing=layer1", "trainer.activation_checkpointing", "a list"),
    case("trainer.compile=1", "trainer.compile", "true or false"),
    case("trainer.gradient_noise={etta:1}", "trainer.gradient_noise.etta", "eta?"),
    case("strategy=dpp", "strategy", "did you mean d"),
    case("strategy.devices=0", "strategy.devices", ">= 1"),
    case("callbacks=[default,emma]", "callbacks", "did you mean ema?"),
    case("callbacks.progress=3", "callbacks.progress", "section"),
    case("~callbacks.nothing", "callbacks.nothing", "does not exist"),
    case("experiment=resnet81", "experiment", "did you mean resnet18?"),
    case("+experiment=zz", "experiment", "choose of"),
    case("optimizer.lr=0.1,0.2", "optimizer.lr", "-m"),
    case("optimizer.lr=${optimiser.lr}", "optimizer.lr", "refers to nothing"),
    case("optimizer.lr=${optimizer.lr}", "optimizer.lr", "back to itself"),
    case("name=${oc.env:REGIMEN_NOT_SET}", "name", "REGIMEN_NOT_SET is not set", "give a default"),
    case("name=${shell:ls}", "name", "not available"),
    case("hydra.run.dir=/tmp/x", "hydra.run.dir", "run_dir"),
    case("hydra.job.env_set.A=1", "hydra.job.env_set.A", "cannot be set"),
    case("hydra/launcher=joblib", "hydra/launcher", "cannot be set"),
    case("[", "[", "not an override"),
    case("model._target_=nowhere.Net", "model._target_", "not allowed", "--allow-target nowhere"),
    case("model._target_=torch.hub.load", "model._target_", "not allowed"),
    case("model._target_=5", "model._target_", "dotted path"),
    case("seed", "seed", "not an override"),
    case("=3", "=3", "no key before"),
    case("run_dir=~/x", "run_dir=~/x", "write $HOME for ~"),
    case("run_dir=/tmp/ü", "run_dir=/tmp/ü", """quote it: "run_dir='/tmp/ü'" """[:-1]),
    case("run_dir=lr=0.1", "run_dir=lr=0.1", """quote it: "run_dir='lr=0.1'" """[:-1]),
    case("run_dir=it's!", "run_dir=it's!", "quote it: 'run_dir="),
    case("model=[mlp,resnet18]", "model", "takes one choice, not 2"),
    case("loader=null", "loader", "missing", "choose of default"),
    case("~trainer", "trainer", "missing"),
    case("optimizer.eps=inf", "optimizer.eps", "a finite number"),
    case("loader.batch_size=99999999999999999999", "loader.batch_size", "64 bits"),
    case("+model.big=[99999999999999999999]", "model.big.0", "64 bits"),
    case("loader.num_workers=100000", "loader.num_workers", "<= 1024"),
    case("loader.eval.num_workers=100000", "loader.eval.num_workers", "<= 1024"),
    case("optimizer.param_groups=[]", "optimizer.param_groups", "a section of keys, got [] (list)"),
    case("trainer.max_time=00:00:00", "trainer.max_time", "more than 0"),
    case("trainer.max_time=1:99:00", "trainer.max_time", "up to 59"),
    case("trainer=[]", "trainer", "every run needs one", "choose of default"),
]

# Found where nothing else is wrong in their section, or at odds with another case's choices.
ALONE = [
    case(
        "callbacks.checkpoint.monitor=val/acuracy", "callbacks.checkpoint.monitor", "val/accuracy"
    ),
    case("model._target_=models.resnet.ResNett", "model._target_", "did you mean ResNet?"),
    case("model=null", "model", "missing"),
    case("~model._target_", "model._target_", "missing"),
    case("data=image_folder", "data.root", "missing", "data.root="),
    case("trainer.max_epochs=null", "trainer.max_epochs", "nothing would end the run"),
    case("trainer.clip_grad_per_group=true", "trainer.clip_grad_per_group", "clip_grad_norm"),
    case("trainer.limit_train_batches=0", "trainer.limit_train_batches", "nothing to train on"),
    case("strategy.devices=[]", "strategy.devices", "a list of device numbers"),
    case("strategy.static_graph=true", "strategy.static_graph", "only with strategy=ddp"),
    case("strategy=ddp strategy.backend=mpi", "strategy.backend", "auto, nccl, gloo"),
    case("strategy=ddp strategy.timeout=0", "strategy.timeout", "> 0"),
    case("data.image_size=abc", "data.image_size", "an integer >= 1", "'abc'"),
    case("data.channels=0", "data.channels", "an integer >= 1"),
    case("data=image_folder data.root=. data.channels=1", "data.mean", "3 values", "each channel"),
    case("data=image_folder data.root=. data.val_fraction=1", "data.val_fraction", "< 1"),
    case("data=image_folder data.root=. data.val_fraction=-0.1", "data.val_fraction", "-0.1"),
]

# Found by the signatures, once every name is right.
TARGETS = [
    case("model.depth=deep", "model.depth", "expected", "'deep'"),
    case("~model.num_classes", "model.num_classes", "missing"),
    case("optimizer.amsgrad=please", "optimizer.amsgrad", "expected bool"),
]

# Found once keys and types are right.
ARGUMENTS = [
    case("+model.dept=18", "model.dept", "did you mean depth?"),
    case("+data.train.shuffle=1", "data.train.shuffle", "no argument 'shuffle'"),
    case(
        "transforms.train.crop={_target_:torchvision.transforms.v2.RandomCrop,sise:3}",
        "transforms.train.crop.sise",
        "did you mean size?",
    ),
    case("+optimizer.betaz=[0,0]", "optimizer.betaz", "did you mean betas?"),
    case("+task.los=1", "task.los", "did you mean loss?"),
    case("+lr_scheduler.pct=0.1", "lr_scheduler.pct", "no argument 'pct'"),
    case("+callbacks.progress.colour=1", "callbacks.progress.colour", "no argument 'colour'"),
]


# Found by building, over no data: each stands alone, for a node tells one mistake at a time.
VALUES = [
    case("model=mlp model.hidden=[-5]", "model", "negative dimension"),
    case("optimizer=adam optimizer.betas=[0.9]", "optimizer", "out of range"),
    case("lr_scheduler=lambda lr_scheduler.lr_lambda=f", "lr_scheduler.lr_lambda", "functions: {"),
    case("task.metrics.mine={_target_:torch.nn.ReLU}", "task", "metrics.mine", "has no reset"),
    case("task.loss.label_smoothing=7", "task.loss", "between 0.0 and 1.0"),
    case("callbacks=[default,swa] callbacks.swa.start_epoch=5.5", "callbacks.swa", "a whole"),
    case(
        "callbacks=[default,pruning] callbacks.pruning.rules.weights.match=nowhere",
        "callbacks.pruning",
        "rules.weights: matches no parameter",
    ),
    case("callbacks=[default,pruning] strategy=fsdp", "callbacks.pruning", "strategy=ddp"),
    case("callbacks=[default,qat] strategy=fsdp", "callbacks.qat", "strategy=ddp"),
    case("callbacks.tensorboard.hparams=abc", "callbacks.tensorboard", "a list of globs, such as"),
]


@pytest.mark.parametrize(
    "cases",
    [
        *(pytest.param(r, id=f"round-{i}") for i, r in enumerate(rounds(KEYS_AND_TYPES))),
        *(pytest.param([one], id=" ".join(one.overrides)) for one in (*ALONE, *VALUES)),
        *(pytest.param(r, id=f"arguments-{i}") for i, r in enumerate(rounds(ARGUMENTS))),
        *(pytest.param(r, id=f"targets-{i}") for i, r in enumerate(rounds(TARGETS))),
    ],
)
def test_a_mistake_names_its_key_and_the_way_out(cases: list[Case]) -> None:
    error = mistakes(*(override for one in cases for override in one.overrides))
    assert error.exit_code == 2
    for one in cases:
        message = " ".join(str(p) for p in error.problems if p.key == one.key)
        assert [text for text in one.texts if text not in message] == [], (one, message)


def test_all_mistakes_come_together() -> None:
    error = mistakes("lrr=1", "seed=-1", "+foo.bar=2", "model=resnet19", "a=[1", "~zz", "name=../x")
    keys = [problem.key for problem in error.problems]
    assert keys == ["a=[1", "model", "zz", "lrr", "foo", "name", "seed"]
    assert str(error).startswith("7 mistakes")
    assert len(str(error).splitlines()) == 8


def test_unknown_arguments_are_listed_with_unknown_keys() -> None:
    wrong = ["optimizer.lrr=3", "trainer.max_epoch=abc", "model.dept=3", "+task.los=1"]
    error = mistakes(*wrong, "lr_scheduler.pct=0.1", "optimizer.param_groups={a: {}}")
    assert [problem.key for problem in error.problems] == [
        "trainer.max_epoch",
        "model.dept",
        "task.los",
        "optimizer.lrr",
        "lr_scheduler.pct",
    ]


def test_a_folder_of_configs_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    assert "there is no folder" in str(mistakes("--config-dir", str(tmp_path / "nowhere")))
    assert "--config-dir" in str(mistakes("--config-dir", "d" * 300))
    monkeypatch.setattr("scripts.composition.sources.os.scandir", refuse)
    assert "Permission denied" in str(mistakes("--config-dir", str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("name: mine\n  seed:3\n", "colon of 'seed:3'", id="next-line"),
        pytest.param("optimizer: {momentum:0.5}\n", "colon of 'momentum:0.5'", id="braces"),
        pytest.param("seed:3\n", "expected keys and values", id="alone"),
        pytest.param("defaults: [optional /model@zz: nope]\n", "no /model=nope", id="option"),
        pytest.param("defaults: [optional ../x: y]\n", "is outside", id="outside"),
        pytest.param("defaults: [override /model: [mlp, gan]]\n", "one choice", id="two-nodes"),
        pytest.param("defaults: [override /loader: null]\n", "missing", id="no-loader"),
        pytest.param("loader: null\n", "expected a section", id="null-loader"),
    ],
)
def test_a_file_that_does_not_say_what_it_seems_to(
    tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    with pytest.raises(ConfigError, match=complaint) as caught:
        compose(["--config-dir", str(tmp_path), "experiment=mine"])
    assert any("mine.yaml" in str(problem.file) for problem in caught.value.problems)


def test_a_mistake_in_a_file_names_file_and_line(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    text = "# train experiment=mine\n# @package _global_\nname: mine\ntrainer:\n  max_epoch: 3\n"
    (folder / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(["--config-dir", str(tmp_path), "experiment=mine"])
    (problem,) = caught.value.problems
    assert problem.key == "trainer.max_epoch"
    assert problem.file == f"{folder / 'mine.yaml'}:5"
    assert problem.hint == "did you mean trainer.max_epochs?"
