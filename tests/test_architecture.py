"""The rules of the layout, held by reading the source: who imports whom, and where."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("conf", "data", "models", "trainer", "callbacks", "scripts")

# What each package may import of the six. Only `trainer/build.py` and its parts, which turn a
# config into objects, see both sides.
ALLOWED = {
    "conf": {"conf"},
    "data": {"data"},
    "models": {"models"},
    "trainer": {"trainer"},
    "callbacks": {"callbacks", "trainer"},
    "scripts": set(PACKAGES),
}
BUILDERS, BUILDERS_ALLOWED = re.compile(r"trainer/build(_\w+)?\.py"), {"trainer", "conf", "data"}

HYDRA_DOORS = {"scripts/compose.py", "trainer/instantiate.py"}

# Importing these must not import torch: help and config errors answer in a second.
LIGHT = (
    "conf.schema",
    "conf.check",
    "conf.errors",
    "conf.reserved",
    "scripts.compose",
    "scripts.train",
    "trainer.errors",
    "trainer.run_directory",
)

LONGEST_FILE = 400
LONGEST_FUNCTION = 60


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(node: ast.AST) -> list[str]:
    """Return the modules that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are absolute"
        return [node.module or ""]
    return []


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        for module in imported(node):
            yield module, getattr(node, "lineno", 0)


def documented(module: ast.Module) -> list[ast.Module | ast.FunctionDef | ast.ClassDef]:
    """Return the module, and its functions and classes that others may use."""
    things = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [module, *(thing for thing in things if not thing.name.startswith("_"))]


def test_there_is_something_to_check() -> None:
    assert {named(path).split("/")[0] for path in sources()} == set(PACKAGES)


def test_imports_run_one_way() -> None:
    wrong = []
    for path in sources():
        name = named(path)
        allowed = BUILDERS_ALLOWED if BUILDERS.fullmatch(name) else ALLOWED[name.split("/")[0]]
        for module, line in imports(path):
            package = module.split(".")[0]
            if package in PACKAGES and package not in allowed:
                wrong.append(f"{name}:{line} imports {module}")
    assert wrong == []


def test_hydra_has_two_doors() -> None:
    users = {
        named(path)
        for path in sources()
        for module, _ in imports(path)
        if module.split(".")[0] in ("hydra", "omegaconf")
    }
    assert users <= HYDRA_DOORS


def test_no_import_of_ours_hides_in_a_function() -> None:
    hidden = []
    for path in sources():
        if named(path).startswith("scripts/"):
            continue  # the command line imports torch only once the config is known to be sound
        for function in ast.walk(tree(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                for node in ast.walk(function):
                    found = [m for m in imported(node) if m.split(".")[0] in PACKAGES]
                    hidden += [f"{named(path)}:{getattr(node, 'lineno', 0)} {m}" for m in found]
    assert hidden == []


def test_package_files_hold_a_docstring_only() -> None:
    for path in sources():
        if path.name == "__init__.py":
            body = tree(path).body
            assert len(body) <= 1, named(path)
            assert all(
                isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in body
            ), named(path)


def test_tests_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_package_is_typed() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)


def test_every_module_and_public_thing_says_what_it_does() -> None:
    silent = [
        f"{named(path)}: {getattr(thing, 'name', 'module')}"
        for path in sources()
        for thing in documented(tree(path))
        if not ast.get_docstring(thing)
    ]
    assert silent == []


def test_files_and_functions_stay_short() -> None:
    long = []
    for path in sources():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LONGEST_FILE:
            long.append(f"{named(path)}: {lines} lines")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno
                if length > LONGEST_FUNCTION:
                    long.append(f"{named(path)}: {node.name} has {length} lines")
    assert long == []


def test_nothing_is_called_for_its_effect_at_import_time() -> None:
    # But that no foreign package stands where one of ours should, before any is imported.
    allowed = {"scripts/train.py: refuse_shadows()", "scripts/evaluate.py: refuse_shadows()"}
    loud = {
        f"{named(path)}: {ast.unparse(node)}"
        for path in sources()
        for node in tree(path).body
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    }
    assert loud <= allowed


@pytest.mark.parametrize("module", LIGHT)
def test_the_way_to_a_config_error_is_free_of_torch(module: str) -> None:
    if not (ROOT / (module.replace(".", "/") + ".py")).exists():
        pytest.fail(f"{module} is gone: take it out of LIGHT")
    heavy = ("torch", "torchvision", "sklearn", "tensorboard", "rich")
    code = f"import sys, {module}; print(*(m for m in {heavy!r} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == ""
