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
    return {
        "name": "run",
        "data": {},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
        "model": {"_target_": "models.m"},
        "task": {"_target_": "trainer.t"},
        **changed,
    }


def keys(raw):
    return [problem.key for problem in check(raw)]


def keys_of_section(name):
    """Return the keys of ours in a section, with what is declared of each."""
    return declared(declared(Config)[name].inner_schema)


def test_a_sound_tree_becomes_dataclasses_with_their_defaults():
    config = parse(tree(trainer={"max_epochs": 3}, data={"image_size": 8}))

    assert config.trainer.max_epochs == 3
    assert config.trainer.precision == "fp32"
    assert config.data.extra == {"image_size": 8}
    assert config.loader == LoaderConfig()
    assert config.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.1}


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        parse(tree(seed="x", trainer={"max_epochs": 0}))

    found = [problem.key for problem in caught.value.problems]
    assert found == ["seed", "trainer.max_epochs"]


@pytest.mark.parametrize("sections", HELD, ids=str)
def test_what_a_key_may_hold(sections):
    assert keys(tree(**sections)) == []


def test_a_mistake_is_found_within_a_section():
    optimizers = {"a": {"lr": -1}, "b": {"other": 2}}
    optimizer = {"lr": "fast", "mine": 1, "optimizers": optimizers}
    assert keys(tree(optimizer=optimizer)) == ["optimizer.lr", "optimizer.optimizers.a.lr"]

    model = {"_target_": "models.m", "sizes": [1, "???"], "rate": math.nan}
    assert keys(tree(model=model)) == ["model.sizes.1", "model.rate"]


def test_a_key_that_a_strategy_does_not_take_is_a_mistake_unless_it_is_the_default():
    idle = {"name": "single", "bucket_cap_mb": 1.0, "broadcast_buffers": True}
    assert keys(tree(strategy=idle)) == ["strategy.bucket_cap_mb"]


def test_values_for_data_sets_of_ones_own_are_free():
    values = {"image_size": None, "channels": "rgb", "val_fraction": 2}

    mine = keys(tree(data={**values, "train": {"_target_": "mine.Samples"}}))
    ours = keys(tree(data={**values, "train": {"_target_": "regimen.data.sources.Digits"}}))

    assert mine == []
    assert ours == ["data.channels", "data.val_fraction"]


def test_defaults_fill_what_was_left_out_and_nothing_that_has_no_effect():
    given = {"strategy": {"name": "dp"}, "loader": {"batch_size": 3}, "zz": 1, "callbacks": 3}

    filled = with_defaults(tree(**given))

    assert filled["loader"]["batch_size"] == 3
    assert filled["loader"]["timeout"] == 600.0
    of_dp = {"_target_", "accelerator", "devices", "device_ids", "output_device", "dim"}
    assert set(filled["strategy"]) == of_dp
    assert list(filled)[:4] == ["name", "seed", "tags", "run_dir"]
    # Wrong ones are told by the check.
    assert filled["callbacks"] == 3
    assert filled["zz"] == 1


@pytest.mark.parametrize("file", ["trainer/default", "loader/default", *STRATEGIES])
def test_a_shipped_group_shows_every_key_with_its_default(file):
    shipped = yaml.safe_load((CONF / f"{file}.yaml").read_text())
    section = file.partition("/")[0]
    given = {}
    if "_target_" in shipped:
        given["_target_"] = shipped["_target_"]

    expected = with_defaults({section: given})[section]

    if section == "loader":
        keys_of_eval = set(shipped.pop("eval"))
        assert keys_of_eval <= set(expected.pop("eval"))
    assert shipped == expected
    for key in keys_of_section(section).values():
        assert key.doc


def test_an_error_keeps_its_problems_in_a_pickle():
    problem = Problem("a", "b", "c", "file.yaml:3")

    again = pickle.loads(pickle.dumps(ConfigError([problem])))

    assert again.problems == [problem]
    assert str(again) == "a: b; c [file.yaml:3]"


def test_an_error_stays_one_line_whatever_it_quotes():
    error = ConfigError([Problem("a\nb", "c\x1b[31m\r", "d\u2028e")])
    assert str(error).isprintable()


def test_every_answer_for_a_foreign_word_is_a_key_that_exists():
    assert our_key("optimizer.lr") is None
    for answer in set(OUR_KEYS.values()):
        for key in re.findall(r"\b(?:trainer|loader|strategy|data)\.\w+", answer):
            section, name = key.split(".")
            # image_size is a key of data sets, which the schema leaves to them.
            assert name in keys_of_section(section) or name == "image_size"
    assert set(VALUES.values()) <= {"fp16", "bf16", "bf16_true", "fp32", "fp64"}


LAUGHS = {f"k{i}": f"${{k{i + 1}}}" * 9 for i in range(50)}
CHAIN = {f"k{i}": f"${{k{i + 1}}}" for i in range(5000)}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        *TABLE["interpolations"],
        ({**LAUGHS, "k50": "x"}, "write out to more"),
        ({**CHAIN, "k5000": 1}, "too many"),
    ],
)
def test_a_fault_of_an_interpolation_is_named_and_what_is_fine_passes(raw, text):
    problems = [str(problem) for problem in Interpolations(raw).problems]

    if text:
        assert text in " ".join(problems)
    else:
        assert problems == []


def test_reserved_interpolations_are_filled_in():
    node = {"a": ["${steps_per_epoch}", 1.5, None, "${total_step}"], "b": "\\d+${total_steps}"}

    filled = fill(node, {"total_steps": 120, "steps_per_epoch": 10})

    assert filled == {"a": [10, 1.5, None, "${total_step}"], "b": "\\d+120"}
    assert fill("${total_steps}", {"steps_per_epoch": 1}) == "${total_steps}"


def test_a_text_that_yaml_cannot_hold_is_refused():
    problems = [str(problem) for problem in check({"name": "a", "model": {"a": "\udcff"}})]

    assert any(text.startswith("model.a: expected text in UTF-8") for text in problems)
