"""The schema and interpolations, held against plain trees. Single mistakes are in mistakes.yaml."""

import math
import pickle
import re
from pathlib import Path

import pytest
import yaml

from regimen.conf.check import check, parse, with_defaults
from regimen.conf.errors import ConfigError, Problem
from regimen.conf.fields import declared
from regimen.conf.interpolation import Interpolations, fill
from regimen.conf.other_words import OUR_KEYS, VALUES, our_key
from regimen.conf.schema import Config, LoaderConfig

CONF = Path(__file__).resolve().parents[2] / "conf"
TABLE = yaml.safe_load((Path(__file__).parents[1] / "mistakes.yaml").read_text())
STRATEGIES = [f"strategy/{name}" for name in ("dp", "ddp", "fsdp")]
NODE = {"_target_": "data.s"}
# Values that keys may hold.
HELD = [
    {"trainer": {"max_time": 3, "clip_grad_norm_type": math.inf, "compile": True}},
    {"trainer": {"max_time": "10:00:00", "limit_train_batches": 0.1, "gradient_noise": None}},
    {"trainer": {"limit_train_batches": 7, "limit_val_batches": 0, "gradient_noise": {"eta": 0.1}}},
    {"trainer": {"compile": {"mode": "max-autotune", "dynamic": None, "fullgraph": True}}},
    {"trainer": {"compile": {"options": {"max_autotune": True, "x.y": 0.5}}}},
    {"strategy": {"devices": [2]}, "loader": {"sampler": NODE}},
]


def tree(**changed):
    nodes = {"model": {"_target_": "models.m"}, "task": {"_target_": "trainer.t"}}
    optimizer = {"_target_": "torch.optim.SGD", "lr": 0.1}
    return {"name": "run", "data": {}, "optimizer": optimizer, **nodes, **changed}


def keys(raw):
    return [problem.key for problem in check(raw)]


def test_a_sound_tree_becomes_dataclasses_with_their_defaults():
    config = parse(tree(trainer={"max_epochs": 3}, data={"image_size": 8}))
    assert (config.trainer.max_epochs, config.trainer.precision) == (3, "fp32")
    assert config.data.extra == {"image_size": 8}
    assert config.loader == LoaderConfig()
    assert config.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.1}
    with pytest.raises(ConfigError) as caught:
        parse(tree(seed="x", trainer={"max_epochs": 0}))
    assert [p.key for p in caught.value.problems] == ["seed", "trainer.max_epochs"]


def test_what_a_key_may_hold_and_where_a_mistake_is_found():
    assert [keys(tree(**sections)) for sections in HELD] == [[]] * len(HELD)
    optimizer = {"lr": "fast", "mine": 1, "optimizers": {"a": {"lr": -1}, "b": {"other": 2}}}
    assert keys(tree(optimizer=optimizer)) == ["optimizer.lr", "optimizer.optimizers.a.lr"]
    raw = tree(model={"_target_": "models.m", "sizes": [1, "???"], "rate": math.nan})
    assert keys(raw) == ["model.sizes.1", "model.rate"]
    idle = {"name": "single", "bucket_cap_mb": 1.0, "broadcast_buffers": True}  # a default is fine
    assert keys(tree(strategy=idle)) == ["strategy.bucket_cap_mb"]
    free = {"image_size": None, "channels": "rgb", "val_fraction": 2}  # the user's own may take it
    assert keys(tree(data={**free, "train": {"_target_": "mine.Samples"}})) == []
    ours = keys(tree(data={**free, "train": {"_target_": "regimen.data.sources.Digits"}}))
    assert ours == ["data.channels", "data.val_fraction"]


def test_defaults_fill_what_was_left_out_and_nothing_that_has_no_effect():
    given = {"strategy": {"name": "dp"}, "loader": {"batch_size": 3}, "zz": 1, "callbacks": 3}
    filled = with_defaults(tree(**given))
    assert (filled["loader"]["batch_size"], filled["loader"]["timeout"]) == (3, 600.0)
    of_dp = {"_target_", "accelerator", "devices", "device_ids", "output_device", "dim"}
    assert set(filled["strategy"]) == of_dp
    assert list(filled)[:4] == ["name", "seed", "tags", "run_dir"]
    assert (filled["callbacks"], filled["zz"]) == (3, 1)  # told by the check


@pytest.mark.parametrize("file", ["trainer/default", "loader/default", *STRATEGIES])
def test_a_shipped_group_shows_every_key_with_its_default(file):
    shipped = yaml.safe_load((CONF / f"{file}.yaml").read_text())
    section = file.partition("/")[0]
    given = {"_target_": shipped["_target_"]} if "_target_" in shipped else {}
    expected = with_defaults({section: given})[section]
    if section == "loader":
        assert set(shipped.pop("eval")) <= set(expected.pop("eval"))
    assert shipped == expected
    assert all(one.doc for one in declared(declared(Config)[section].inner_schema).values())


def test_an_error_keeps_its_problems_and_stays_one_line_whatever_it_quotes():
    again = pickle.loads(pickle.dumps(ConfigError([Problem("a", "b", "c", "file.yaml:3")])))
    assert again.problems == [Problem("a", "b", "c", "file.yaml:3")]
    assert str(again) == "a: b; c [file.yaml:3]"
    assert str(ConfigError([Problem("a\nb", "c\x1b[31m\r", "d\u2028e")])).isprintable()


def test_every_answer_for_a_foreign_word_is_a_key_that_exists():
    assert our_key("optimizer.lr") is None
    for answer in {*OUR_KEYS.values()}:
        for key in re.findall(r"\b(?:trainer|loader|strategy|data)\.\w+", answer):
            section, name = key.split(".")
            assert name in (*declared(declared(Config)[section].inner_schema), "image_size")
    assert set(VALUES.values()) <= {"fp16", "bf16", "bf16_true", "fp32", "fp64"}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        *TABLE["interpolations"],
        ({f"k{i}": f"${{k{i + 1}}}" * 9 for i in range(50)} | {"k50": "x"}, "write out to more"),
        ({f"k{i}": f"${{k{i + 1}}}" for i in range(5000)} | {"k5000": 1}, "too many"),
    ],
)
def test_a_fault_of_an_interpolation_is_named_and_what_is_fine_passes(raw, text):
    found = " ".join(map(str, Interpolations(raw).problems))
    assert text in found if text else found == ""


def test_reserved_interpolations_are_filled_in():
    node = {"a": ["${steps_per_epoch}", 1.5, None, "${total_step}"], "b": "\\d+${total_steps}"}
    filled = {"a": [10, 1.5, None, "${total_step}"], "b": "\\d+120"}
    assert fill(node, {"total_steps": 120, "steps_per_epoch": 10}) == filled
    assert fill("${total_steps}", {"steps_per_epoch": 1}) == "${total_steps}"


def test_a_text_that_yaml_cannot_hold_is_refused():
    found = [str(problem) for problem in check({"name": "a", "model": {"a": "\udcff"}})]
    assert any(text.startswith("model.a: expected text in UTF-8") for text in found)
