"""The rules of the layout, held by reading the source: who imports whom, where, and how much."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from plainness import measure

ROOT = Path(__file__).resolve().parents[1]
OURS = "regimen."  # before the name of each module; left out here
PACKAGES = ("conf", "data", "models", "trainer", "callbacks", "scripts")

# The rooms, the lower ones first: a module imports from its own room and from lower ones only.
# Rooms of one line know nothing of each other. A module of a package's top is a room of its own
# where it is named here.
ORDER = (
    ("conf.layout",),
    ("trainer.device",),
    ("conf.errors",),
    ("conf.addresses",),
    ("conf.json_text", "conf.patterns"),
    ("conf", "data"),
    ("data.loading",),
    ("trainer.state", "trainer.rng"),
    ("trainer.errors",),
    ("trainer.files", "trainer.targets", "trainer.options", "trainer.distributed", "trainer.fast"),
    ("trainer.media",),
    ("trainer.task",),
    ("trainer.callback",),
    ("trainer.tasks",),
    ("trainer.runs",),
    ("trainer.checkpoints",),
    ("models",),
    ("trainer.optimizers", "trainer.strategies"),
    ("trainer.lr_schedulers",),
    ("trainer.components",),
    ("trainer.runs.results", "trainer.runs.interrupt"),
    ("trainer.runs.from_python",),
    ("trainer.update",),
    ("trainer.evaluation", "trainer.snapshot"),
    ("trainer.runs.rewind",),
    ("trainer.trainer",),
    ("trainer.assembly",),
    ("trainer.inference",),
    ("trainer.export",),
    ("callbacks.support",),
    ("callbacks.trackers",),
    ("callbacks",),
    ("scripts.cli",),
    ("scripts.composition",),
    ("scripts.runs",),
    ("scripts.runs.launch", "scripts.sweeps"),
    ("scripts",),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}

# `trainer` and `callbacks` get data sets, models and keys handed in: only `trainer.assembly`, which
# turns a configuration into objects, sees both sides, and what stands on it. What a batch is, both
# name alike; what a mistake is (in options that are made in Python, too), how `${total_steps}` is
# filled in, and how a stranger's text is read, everybody knows.
BLIND = re.compile(r"(trainer(?!\.(assembly|inference|export)\b)|callbacks)\b")
UNSEEN = ("conf", "data", "models")
KNOWN_TO_ALL = (
    "conf.errors",
    "conf.check",
    "conf.python_words",
    "conf.addresses",
    "conf.interpolation",
    "conf.json_text",
    "conf.layout",
    "conf.patterns",
    "conf.yaml_file",
    "conf.schema_trainer",
    "data.batch",
    "data.tokenizers",
)

# The amount of logic, in expressions as `tests/tools/plainness.py` counts them: no line break
# changes it. A number goes down with what is thrown away, and up in the commit that brings a
# capability. Lines are free.
EXPRESSIONS = {
    "conf": 2420,
    "data": 10283,
    "models": 1774,
    "trainer": 23297,
    "callbacks": 5078,
    "scripts": 10251,
}
# Habits that make a line hard to read, per 1,000 code lines of the six packages: at most.
HABITS = {
    "expressions": 1521,
    "pairs": 0.0,
    "ternaries": 18.5,
    "comprehensions": 29.7,
    "walruses": 0.3,
    "truths as numbers": 0.0,
    "fragments of messages": 0.0,
}
# The same of the tests, whose tables and calls of torch are denser.
HABITS_OF_TESTS = {
    "expressions": 1825,
    "pairs": 0.1,
    "ternaries": 5.2,
    "comprehensions": 31.9,
    "walruses": 0.1,
    "truths as numbers": 0.0,
    "fragments of messages": 0.1,
}

# A room holds up to 16 modules; those whose files YAML names may hold more.
LARGEST_ROOM = 16
NAMED_BY_YAML = ("callbacks", "data", "models", "trainer/tasks")

HYDRA_DOOR = "scripts/composition/"

# Importing these must not import torch: help and config errors answer in a second.
LIGHT = """
conf.schema conf.check conf.errors conf.interpolation scripts.composition.compose scripts.train
scripts.catalog scripts.help scripts.schema scripts.list_runs trainer.errors trainer.runs.directory
"""

# Files that name something private of torch, torchvision or Hydra, and why; six at most are meant
# to remain. What is private may change with any version, so each has a test of what it needs.
PRIVATE = {
    "scripts/cli/deferred.py": "a start without torch's compiler: a third of it",
    "trainer/errors.py": "frames of torch's that hide where an error comes from",
    "trainer/export/formats.py": "the way to a compiled package (aoti)",
    "trainer/targets/allow_list.py": "where torch defines the functions of `torch.nn.functional`",
    "trainer/fast.py": "steps, backward passes and norms without wrappers: 40% of a small update",
}

# What is imported for its types alone, by file.
TYPES_ALONE = {
    # The parent of a sweep reads metrics without torch.
    ("callbacks/support.py", "trainer.task"),
}

# Calls that wait for a device or for other processes.
WAITS_AND_COLLECTIVES = (
    "item",
    "synchronize",
    "full_tensor",
    "barrier",
    "all_reduce",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "gather_data",
    "run_on_main",
)
LONGEST_FILE = 450  # code lines: comments and docstrings are free
LONGEST_FUNCTION = 46  # statements
DEEPEST = 4  # blocks within a function

# Files that name a kind of accelerator, and why; all else goes by `trainer/device.py`.
KINDS = re.compile(r"\b(cuda|mps|xpu|hpu|npu)\b", re.I)
NAME_A_KIND = {
    "trainer/device.py": "what differs between kinds",
    "trainer/components/setup.py": "TF32, cuDNN and cuBLAS, which are CUDA's alone",
    "trainer/strategies/data_parallel.py": "nn.DataParallel, whose kernels are CUDA's",
    "scripts/doctor.py": "the driver of NVIDIA's GPUs",
    "scripts/cli/keys.py": "an example in a message",
    "conf/schema_trainer.py": "examples in a meaning",
    "conf/other_words.py": "examples in a message",
    "trainer/errors.py": "how device libraries begin their errors",
}

# Each is the usual term in both of its rooms: a callback and a metric, a network and a task.
NAMED_TWICE = {"ConfusionMatrix", "GAN"}


SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
# The files that can import something: an `__init__.py` holds a docstring only.
MODULES = [path for path in SOURCES if path.name != "__init__.py"]
# But this one, of `from regimen.trainer import Trainer`.
LAZY = [ROOT / "trainer" / "__init__.py"]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
BLOCK = ast.For | ast.While | ast.If | ast.With | ast.Try | ast.AsyncFor | ast.AsyncWith


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return named(path).removesuffix(".py").replace("/", ".")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(within: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the modules that import statements name, and the lines."""
    for node in ast.walk(within):
        if isinstance(node, ast.Import):
            yield from ((alias.name.removeprefix(OURS), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield (node.module or "").removeprefix(OURS), node.lineno


def ours(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


@cache
def edges(path: Path) -> list[tuple[str, int]]:
    """Return the modules of ours that a module imports, for its types too, and the lines."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [name for name, _ in imports(node) if ours(name)]
            package = isinstance(node, ast.ImportFrom) and names
            if package and (ROOT / names[0].replace(".", "/")).is_dir():
                names = [f"{names[0]}.{alias.name}" for alias in node.names]
            found += [(name, node.lineno) for name in names]
    return found


def room_of(module: str) -> str:
    """Return the room that a module belongs to: the longest part of its name that is one."""
    while module not in LEVEL:
        module = module[: module.rindex(".")]
    return module


def in_circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that are in a circle of imports, or between two."""
    while True:
        leaves = {name for name, ends in graph.items() if not ends}
        if not leaves:
            break
        graph = {name: ends - leaves for name, ends in graph.items() if name not in leaves}
    # What imports a circle is left as well: take away from the other side, too.
    while True:
        imported = {end for ends in graph.values() for end in ends}
        roots = graph.keys() - imported
        if not roots:
            return list(graph)
        graph = {name: ends for name, ends in graph.items() if name not in roots}


def test_imports_run_one_way_and_in_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    wrong = []
    for path in MODULES:
        here = module_of(path)
        graph[here] = {module for module, _ in edges(path)} - {here}
        for module, line in edges(path):
            room = room_of(here)
            other = room_of(module)
            if room != other and LEVEL[other] >= LEVEL[room]:
                wrong.append(f"{named(path)}:{line} imports {module}")
    assert wrong == []
    graph = {name: ends & graph.keys() for name, ends in graph.items()}
    assert in_circles(graph) == []


def test_the_packages_are_imported_by_their_whole_names() -> None:
    """In a checkout `import data` would find a second copy of `regimen.data`."""
    found = []
    for folder in (*PACKAGES, "tests", "benchmarks", "examples", "template", "src/regimen"):
        for path in sorted((ROOT / folder).glob("**/*.py")):
            for node in ast.walk(tree(path)):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                bare = [name for name in names if name.split(".")[0] in PACKAGES]
                found += [f"{named(path)}:{node.lineno} imports {name}" for name in bare]
    assert found == []


def test_who_may_not_see_what() -> None:
    """The loop and callbacks no config, data and model, all but a room no Hydra, and no hiding."""
    seen = []
    for path in SOURCES:
        for module, line in imports(tree(path)):
            top = module.split(".")[0]
            blind = path in MODULES and BLIND.match(module_of(path))
            hydra = top in ("hydra", "omegaconf") and not named(path).startswith(HYDRA_DOOR)
            if hydra or (blind and top in UNSEEN and module not in KNOWN_TO_ALL):
                seen.append(f"{named(path)}:{line} imports {module}")
    # The command line imports torch only once the config is known to be sound.
    for path in [path for path in MODULES if not named(path).startswith("scripts/")]:
        for node in ast.walk(tree(path)):
            if isinstance(node, FUNCTION):
                hidden = [f"{named(path)}:{line} {m}" for m, line in imports(node) if ours(m)]
                seen += hidden
    assert seen == []


def test_rooms_stay_small_and_say_what_they_are_for() -> None:
    for folder in {path.parent for path in MODULES}:
        inside = [path for path in MODULES if path.parent == folder]
        assert len(inside) <= LARGEST_ROOM or named(folder) in NAMED_BY_YAML, named(folder)
        sentence = ast.get_docstring(tree(folder / "__init__.py"))
        assert re.fullmatch(r"[^\n]+\.", sentence or ""), named(folder)


def test_the_amount_of_logic_stays_within_its_budget() -> None:
    amounts: Counter[str] = Counter()
    for path in SOURCES:
        amounts[named(path).split("/")[0]] += counts(path)["expressions"]
    assert {name: n for name, n in amounts.items() if n > EXPRESSIONS[name]} == {}


@pytest.mark.parametrize(
    ("paths", "habits"),
    [
        pytest.param(SOURCES, HABITS, id="packages"),
        pytest.param(sorted((ROOT / "tests").rglob("*.py")), HABITS_OF_TESTS, id="tests"),
    ],
)
def test_habits_that_make_a_line_hard_to_read_do_not_spread(
    paths: Sequence[Path], habits: Mapping[str, float]
) -> None:
    total: Counter[str] = Counter()
    for path in paths:
        total.update(counts(path))
    rates = {name: 1000 * total[name] / total["lines"] for name in habits}
    assert {name: rate for name, rate in rates.items() if rate > habits[name]} == {}


def test_waits_and_collectives_have_their_reason_beside_them() -> None:
    """A comment in the five lines above, or a docstring that says so."""
    bare = []
    for path in MODULES:
        if named(path).split("/")[0] != "trainer":
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        for function in ast.walk(tree(path)):
            if not isinstance(function, ast.FunctionDef):
                continue
            said = (ast.get_docstring(function) or "").lower()
            if re.search(r"collective|\bwaits?\b|every process|all processes", said):
                continue
            for node in ast.walk(function):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                if node.func.attr not in WAITS_AND_COLLECTIVES:
                    continue
                above = lines[max(0, node.lineno - 6) : node.end_lineno]
                if not any("#" in line for line in above):
                    bare.append(f"{named(path)}:{node.lineno} {node.func.attr}")
    assert sorted(set(bare)) == []


def test_nothing_of_ours_is_imported_for_types_alone() -> None:
    """Such an import hides a circle; a start without torch is the one other reason."""
    hidden = set()
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                hidden |= {(named(path), name) for name, _ in imports(node) if ours(name)}
    assert hidden == TYPES_ALONE


@cache
def counts(path: Path) -> Counter[str]:
    return measure(path.read_text(encoding="utf-8"))


def test_what_is_private_elsewhere_is_named_in_few_files() -> None:
    assert {named(path) for path in SOURCES if any(private_names(tree(path)))} == PRIVATE.keys()


def test_kinds_of_accelerators_are_named_in_one_module_but_for_what_is_cudas_alone() -> None:
    found = {named(path) for path in SOURCES if KINDS.search(path.read_text(encoding="utf-8"))}
    assert found == NAME_A_KIND.keys()


def private_names(module: ast.Module) -> Iterator[str]:
    """Yield what a file names, in strings too, with a leading underscore below torch and Hydra."""
    bound = set()
    for node in ast.walk(module):
        text = str(node.value) if isinstance(node, ast.Constant) else ""
        if re.fullmatch(r"(torch|torchvision|hydra)[.\w]+", text):
            yield from filter(is_private, text.split("."))
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                whole = f"{base}{alias.name}"
                if whole.split(".")[0] in ("torch", "torchvision", "hydra"):
                    bound.add(alias.asname or (alias.name if base else whole.split(".")[0]))
                    yield from filter(is_private, whole.split("."))
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in bound:
                yield node.attr


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_packages_are_typed_and_their_files_hold_a_docstring_only() -> None:
    assert {named(path).split("/")[0] for path in SOURCES} == set(PACKAGES)
    assert (ROOT / "src/regimen/py.typed").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    for path in set(SOURCES) - set(MODULES):
        body = tree(path).body
        if path in LAZY:
            assert {type(node) for node in body} == {ast.Expr, ast.ImportFrom, ast.FunctionDef}
        else:
            assert len(body) == (ast.get_docstring(tree(path)) is not None), named(path)


def test_files_and_functions_stay_readable_and_say_what_they_do() -> None:
    found = []
    for path in SOURCES:
        whole = tree(path)
        things = [node for node in whole.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        public = [thing for thing in things if not thing.name.startswith("_")]
        silent = [thing for thing in (whole, *public) if not ast.get_docstring(thing)]
        found += [f"{named(path)}: {getattr(one, 'name', 'it')} says nothing" for one in silent]
        if counts(path)["lines"] > LONGEST_FILE:
            found.append(f"{named(path)}: {counts(path)['lines']} code lines")
        for node in ast.walk(whole):
            if isinstance(node, FUNCTION):
                length = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
                if length > LONGEST_FUNCTION or depth(node) > DEEPEST:
                    found.append(
                        f"{named(path)}: {node.name}: {length} statements, {depth(node)} deep"
                    )
    assert found == []


def depth(node: ast.AST) -> int:
    """Count the blocks around the innermost statement of a function; `elif` opens none."""
    deepest = 0
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, FUNCTION | ast.ClassDef):
                other = name == "orelse" and isinstance(child, ast.If) and len(value) == 1
                inside = depth(child) + (isinstance(child, BLOCK) and not other)
                deepest = max(deepest, inside)
    return deepest


def test_class_names_differ_and_nothing_is_called_at_import_time() -> None:
    body = [(path, node) for path in SOURCES for node in tree(path).body]
    classes = [node.name for _, node in body if isinstance(node, ast.ClassDef)]
    names = Counter(name for name in classes if not name.startswith("_"))
    assert {name for name, count in names.items() if count > 1} == NAMED_TWICE
    assert {
        f"{named(path)}: {ast.unparse(node)}"
        for path, node in body
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    } == set()


@pytest.mark.parametrize("module", LIGHT.split())
def test_the_way_to_a_config_error_is_free_of_torch(module: str) -> None:
    heavy = ("torch", "torchvision", "sklearn", "tensorboard")
    code = f"import sys, regimen.{module}; print(*(m for m in {heavy!r} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == ""
