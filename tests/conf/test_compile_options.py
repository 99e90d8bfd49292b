"""What `trainer.compile` takes: words and numbers that name no program."""

from typing import Any

import pytest
from torch import _inductor

from conf.check import parse
from conf.compile_options import MODES, compile_problems
from conf.errors import ConfigError
from scripts.composition.compose import compose
from trainer.build.check import check_targets


def test_the_modes_are_torchs() -> None:
    assert set(MODES) <= set(_inductor.list_mode_options())


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"mode": "max-autotune", "dynamic": None, "fullgraph": True}, id="mode"),
        pytest.param({"backend": "inductor", "options": {"max_autotune": True}}, id="switch"),
        pytest.param({"options": {"aggressive_fusion": False, "x.y": 0.5}}, id="numbers"),
    ],
)
def test_what_is_taken(given: dict[str, Any]) -> None:
    assert list(compile_problems(given)) == []


@pytest.mark.parametrize(
    ("given", "key", "text"),
    [
        pytest.param({"options": {"cpp.cxx": "evil"}}, "options.cpp.cxx", "numbers", id="program"),
        pytest.param({"options": {"cpp.cxx": ["", "sh"]}}, "options.cpp.cxx", "numbers", id="list"),
        pytest.param({"options": {"a": {"b": 1}}}, "options.a", "numbers", id="nested"),
        pytest.param(
            {"options": {"fx_graph_remote_cache": True}},
            "options.fx_graph_remote_cache",
            "other machines",
            id="remote-cache",
        ),
        pytest.param({"options": [1]}, "options", "names and values", id="no-dict"),
        pytest.param({"backend": {"_target_": "os.system"}}, "backend", "the name", id="node"),
        pytest.param({"mode": "fast"}, "mode", "one of default", id="mode"),
        pytest.param({"dynamik": True}, "dynamik", "did you mean dynamic", id="misspelt"),
        pytest.param({"disable": True}, "disable", "unknown key", id="another-argument"),
        pytest.param({"fullgraph": 1}, "fullgraph", "true or false", id="number-for-switch"),
        pytest.param(
            {"mode": "default", "options": {"a": 1}}, "options", "excludes", id="mode-and-options"
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], key: str, text: str) -> None:
    found = {problem.key: str(problem) for problem in compile_problems(given)}
    assert text in found[f"compile.{key}"]


def test_a_backend_and_an_option_that_torch_has_not_are_named() -> None:
    for override, key in (
        ("trainer.compile={backend: nothing}", "trainer.compile.backend"),
        ("trainer.compile={options: {no_such: 1}}", "trainer.compile.options.no_such"),
    ):
        config = parse(compose(["experiment=resnet18", "model=mlp", override]).config)
        with pytest.raises(ConfigError) as caught:
            check_targets(config)
        assert [problem.key for problem in caught.value.problems] == [key]
