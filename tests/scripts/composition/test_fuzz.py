"""Whatever is typed or written, a composition ends soon, in a configuration or a ConfigError."""

import contextlib
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from regimen.conf.errors import ConfigError
from regimen.scripts.composition.compose import compose

INPUTS = settings(
    max_examples=60,
    deadline=timedelta(seconds=5),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# fmt: off
KEYS = [
    "seed", "name", "model", "model.a", "trainer.max_epochs", "x.y.z", "hydra.run.dir", "a/b", "",
]
VALUES = [
    "1", "010", "1_000", "1e999", "nan", "-0", "true", "no", "null", "''", "'a", "[1,[2]]",
    "{a: {b: 1}}", "{a:b", "${seed}", "${a", "${model}", "${oc.env:X}", "${oc.env:X,${seed}}",
    "${oc.decode:'{}'}", "a,b", "range(1,4)", "range(0,1e9)", "choice(a)", "glob(*)", "\\", "???",
    "interval(0,1)", "sort(1)", "shuffle(3,2)", "tag(a)", "int(x)", "../../x", "9" * 400,
    "é\u202e",
]
# fmt: on
SIGNS = ["", "+", "++", "~", "+~", "@", "-"]

typed = st.builds(
    lambda sign, key, mark, value: f"{sign}{key}{mark}{value}",
    st.sampled_from(SIGNS),
    st.sampled_from(KEYS) | st.text(max_size=6),
    st.sampled_from(["=", "", "==", ":", "@p="]),
    st.sampled_from(VALUES) | st.text(max_size=10) | st.text("[]{}()',:=$\\ab1.", max_size=20),
)

# fmt: off
SCALARS = [
    "1", "a", "no", "010", "1:30", "~", "''", "${seed}", "${a.b}", "${.a}", "*x", "&x 1", "<<",
    "!!python/name:os.x", "|\n   text", "${oc.select:a}", "\t", "\u2028", "1.0e400", ".nan",
]
# fmt: on
scalars = st.sampled_from(SCALARS) | st.text(max_size=8)
lines = st.builds(
    lambda indent, key, value: f"{' ' * indent}{key}: {value}",
    st.integers(0, 6),
    st.sampled_from(["a", "b", "model", "seed", "hydra", "defaults", "- a", "? x", "<<", "on"]),
    scalars | st.sampled_from(["", "[", "{", "[1, 2]", "{a: 1}", "&x [*x]", "- /model: zz"]),
)
documents = st.lists(lines, max_size=8).map("\n".join).map(str.encode) | st.binary(max_size=60)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a small folder of configs: composing is quick there."""
    folder = tmp_path_factory.mktemp("conf")
    for group in ("model", "experiment"):
        (folder / group).mkdir()
    (folder / "model" / "one.yaml").write_text("_target_: torch.nn.Identity\na: ${seed}\n")
    (folder / "train.yaml").write_text(
        "defaults:\n  - model: one\n  - _self_\n  - experiment: null\n"
        "name: x\nseed: 1\ndata: {}\ntask: {_target_: torch.nn.Identity}\noptimizer: {lr: 0.1}\n"
    )
    assert compose(["--config-path", str(folder)]).config["model"]["a"] == 1
    return folder


def ends_well(argv):
    with contextlib.suppress(ConfigError):
        compose(argv)


@INPUTS
@given(st.lists(typed, min_size=1, max_size=3))
@example(["seed=" + "(" * 20, "+a." * 12 + "=1"])
@example(["model=null", "~model"])
@example(["~" + "9" * 300])
def test_any_overrides(small, overrides):
    ends_well(["--config-path", str(small), *(o for o in overrides if o[:1] != "-")])


@INPUTS
@given(documents)
@example(b"# @package _global_\nmodel: ${model}\n")
@example(b"# @package _global_\ndefaults:\n  - mine\n")
@example(b"# @package _global_\ndefaults: {a: b}\n")
@example(b"# @package ${seed}\na: 1\n")
@example(b"# @package _global_\nname:\n  ? [a, b]\n  : c\n")
@example(b"# @package _global_\n<<: 1\n")
def test_any_file(small, content):
    header = b"" if content.startswith(b"#") else b"# @package _global_\n"
    (small / "experiment" / "mine.yaml").write_bytes(header + content)
    ends_well(["--config-path", str(small), "experiment=mine"])


@INPUTS
@given(st.lists(st.text(max_size=12), max_size=4))
def test_any_arguments(small, argv):
    ends_well(["--config-path", str(small), *argv])
