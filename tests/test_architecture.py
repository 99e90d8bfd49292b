"""The rules of the layout, held by reading the source: who imports whom, where, and how much."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("conf", "data", "models", "trainer", "callbacks", "scripts")

# The rooms, the lower ones first: a module imports from its own room and from lower ones only.
# Rooms of one line know nothing of each other. A module of a package's top is a room of its own
# where it is named here.
ORDER = (
    ("trainer.shadow",),
    ("conf.errors",),
    ("conf", "data"),
    ("data.loading",),
    (
        "trainer.errors",
        "trainer.media",
        "trainer.state",
        "trainer.rng",
    ),
    ("trainer.errors",),
    ("trainer.files", "trainer.targets", "trainer.options", "trainer.distributed"),
    ("trainer.task", "trainer.callback"),
    ("trainer.tasks",),
    ("trainer.runs",),
    ("trainer.checkpoints",),
    ("models",),
    ("trainer.optimizers", "trainer.strategies"),
    ("trainer.lr_schedulers",),
    ("trainer.update",),
    ("trainer.evaluation", "trainer.snapshot"),
    ("trainer.trainer",),
    ("trainer.assembly",),
    ("trainer.inference",),
    ("trainer.export",),
    ("callbacks.support",),
    ("callbacks.trackers",),
    ("callbacks.saving",),
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
# name alike; what a mistake is, and how `${total_steps}` is filled in, everybody knows.
BLIND = re.compile(r"(trainer(?!\.(assembly|inference|export)\b)|callbacks)\b")
UNSEEN = ("conf", "data", "models")
KNOWN_TO_ALL = ("conf.errors", "conf.interpolation", "conf.schema_trainer", "data.batch")

# Code lines (no blank line, comment, docstring) and files: a budget. A number goes down with what
# is thrown away, and up in the commit that brings a new capability.
BUDGET = {
    "conf": 1130,
    "data": 3570,
    "models": 770,
    "trainer": 10120,
    "callbacks": 2885,
    "scripts": 5805,
    "the six packages": 24260,
    "tests": 23540,
    "benchmarks": 1680,
}
FILES = {"the six packages": 221, "tests": 129}

# A room holds up to 12 modules; those whose files YAML names may hold more.
LARGEST_ROOM = 12
NAMED_BY_YAML = ("callbacks", "data", "models", "trainer/tasks")
CROWDED = {"scripts": 13, "trainer": 15}  # to be emptied: no number here goes up
# A module with fewer lines than a chapter and a single reader is part of it: so many are not yet.
CHAPTER = 100
PARAGRAPHS = 7

HYDRA_DOOR = "scripts/composition/"

# Importing these must not import torch: help and config errors answer in a second.
LIGHT = (
    "conf.schema",
    "conf.check",
    "conf.errors",
    "conf.interpolation",
    "scripts.composition.compose",
    "scripts.train",
    "scripts.catalog",
    "scripts.help",
    "scripts.schema",
    "scripts.list_runs",
    "trainer.errors",
    "trainer.runs.directory",
)

# Files that name something private of torch, torchvision or Hydra, and why; six at most are meant
# to remain. What is private may change with any version, so each has a test of what it needs.
PRIVATE = {
    "trainer/optimizers/state.py": "kernels over lists; a step without a wrapper: a tenth of it",
    "trainer/update/precision.py": "a backward pass without 30 us of argument checks",
}

LONGEST_FILE = 450
LONGEST_FUNCTION = 60
DEEPEST = 4  # blocks within a function

# Functions nested deeper, to be written anew.
TOO_DEEP: set[str] = set()

# Each is the usual term in both of its rooms: a callback and a metric, a network and a task.
NAMED_TWICE = {"ConfusionMatrix", "GAN"}


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


def modules() -> list[Path]:
    """Return the files that can import something: an `__init__.py` holds a docstring only."""
    return [path for path in sources() if path.name != "__init__.py"]


def module_of(path: Path) -> str:
    return named(path).removesuffix(".py").replace("/", ".")


def room_of(module: str) -> str:
    """Return the room that a module belongs to: the longest part of its name that is one."""
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next(name for name in names if name in LEVEL)


def edges(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the modules of ours that a module imports when it runs, and the lines."""
    whole = tree(path)
    typing_only = {
        id(node)
        for branch in ast.walk(whole)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(whole):
        if id(node) not in typing_only:
            for module in modules_of(node):
                yield module, getattr(node, "lineno", 0)


def modules_of(node: ast.AST) -> list[str]:
    """Return the modules of ours that a statement imports, `from package import module` too."""
    found = [m for m in imported(node) if m.split(".")[0] in PACKAGES]
    if isinstance(node, ast.ImportFrom) and found and (ROOT / found[0].replace(".", "/")).is_dir():
        return [f"{found[0]}.{alias.name}" for alias in node.names]
    return found


def test_imports_run_one_way() -> None:
    wrong = []
    for path in modules():
        room = room_of(module_of(path))
        for module, line in edges(path):
            other = room_of(module)
            if room != other and LEVEL[other] >= LEVEL[room]:
                wrong.append(f"{named(path)}:{line} imports {module}")
    assert wrong == []


def test_the_loop_and_callbacks_see_no_config_no_data_and_no_model() -> None:
    seen = [
        f"{named(path)}:{line} imports {module}"
        for path in modules()
        if BLIND.match(module_of(path))
        for module, line in imports(path)
        if module.split(".")[0] in UNSEEN and module not in KNOWN_TO_ALL
    ]
    assert seen == []


def test_no_imports_run_in_a_circle() -> None:
    graph = {module_of(path): {m for m, _ in edges(path)} for path in modules()}
    graph = {name: ends & set(graph) - {name} for name, ends in graph.items()}
    while leaves := {name for name, ends in graph.items() if not ends}:
        graph = {name: ends - leaves for name, ends in graph.items() if name not in leaves}
    assert graph == {}


def test_rooms_stay_small_and_say_what_they_are_for() -> None:
    for folder in {path.parent for path in modules()}:
        inside = [path for path in modules() if path.parent == folder]
        most = len(inside) if named(folder) in NAMED_BY_YAML else LARGEST_ROOM
        assert len(inside) <= max(most, CROWDED.get(named(folder), 0)), named(folder)
        sentence = ast.get_docstring(tree(folder / "__init__.py"))
        assert sentence, named(folder)
        assert re.fullmatch(r"[^\n]+\.", sentence), named(folder)


def test_a_module_is_a_chapter() -> None:
    yaml = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "conf").rglob("*.yaml"))
    readers = Counter(module for path in modules() for module in set(edges_of_file(path)))
    short = [
        named(path)
        for path in modules()
        if readers[module_of(path)] == 1
        and len(path.read_text(encoding="utf-8").splitlines()) < CHAPTER
        and f"{module_of(path)}." not in yaml
    ]
    assert len(short) <= PARAGRAPHS, short


def edges_of_file(path: Path) -> Iterator[str]:
    """Yield the modules of ours that a module imports, by the file that defines them."""
    for module, _ in edges(path):
        stem = module
        while stem and not (ROOT / f"{stem.replace('.', '/')}.py").exists():
            stem = stem.rpartition(".")[0]
        if stem:
            yield stem


def test_code_stays_within_its_budget() -> None:
    sizes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        top = named(path).split("/")[0]
        for name in (top, "the six packages") if top in PACKAGES else (top,):
            sizes[name] += code_lines(path)
            files[name] += 1
    assert {n: size for n, size in sizes.items() if size > BUDGET[n]} == {}
    assert {n: files[n] for n, most in FILES.items() if files[n] > most} == {}


def code_lines(path: Path) -> int:
    """Count the lines that hold code: no blank line, comment or docstring."""
    source = path.read_text(encoding="utf-8")
    spans = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
    layout |= {tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout and token.start not in spans:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def test_hydra_has_one_door() -> None:
    users = {
        named(path)
        for path in sources()
        for module, _ in imports(path)
        if module.split(".")[0] in ("hydra", "omegaconf")
    }
    assert {name for name in users if not name.startswith(HYDRA_DOOR)} == set()


def test_what_is_private_elsewhere_is_named_in_few_files() -> None:
    naming = {named(path) for path in sources() if any(private_names(tree(path)))}
    assert naming == PRIVATE.keys()


def private_names(module: ast.Module) -> Iterator[str]:
    """Yield what a file imports or reads with a leading underscore below torch and Hydra."""
    bound = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                whole = f"{base}{alias.name}"
                if whole.split(".")[0] in ("torch", "torchvision", "hydra"):
                    bound.add(alias.asname or (alias.name if base else whole.split(".")[0]))
                    if any(map(is_private, whole.split("."))):
                        yield whole
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in bound:
                yield ast.unparse(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_import_of_ours_hides_in_a_function() -> None:
    hidden = []
    for path in sources():
        if named(path).startswith("scripts/") or path.name == "__init__.py":
            continue  # the command line imports torch only once the config is known to be sound
        for function in ast.walk(tree(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                for node in ast.walk(function):
                    found = [m for m in imported(node) if m.split(".")[0] in PACKAGES]
                    hidden += [f"{named(path)}:{getattr(node, 'lineno', 0)} {m}" for m in found]
    assert hidden == []


def test_package_files_hold_a_docstring_only() -> None:
    # Of `from trainer import load_run` and `from trainer.assembly import build`.
    lazy = [ROOT / "trainer" / "__init__.py", ROOT / "trainer" / "assembly" / "__init__.py"]
    for path in lazy:
        kinds = {type(node) for node in tree(path).body}
        assert kinds == {ast.Expr, ast.ImportFrom, ast.FunctionDef}
    for path in sources():
        if path.name == "__init__.py" and path not in lazy:
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


def test_files_and_functions_stay_readable() -> None:
    long = []
    for path in sources():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LONGEST_FILE:
            long.append(f"{named(path)}: {lines} lines")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno
                if length > LONGEST_FUNCTION:
                    long.append(f"{named(path)}: {node.name} has {length} lines")
                if depth(node) > DEEPEST and node.name not in TOO_DEEP:
                    long.append(f"{named(path)}: {node.name} is nested {depth(node)} deep")
    assert long == []


def depth(node: ast.AST) -> int:
    """Count the blocks around the innermost statement of a function; `elif` opens none."""
    blocks = ast.For | ast.While | ast.If | ast.With | ast.Try | ast.AsyncFor | ast.AsyncWith
    deepest = 0
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if isinstance(child, ast.AST):
                other = name == "orelse" and isinstance(child, ast.If) and len(value) == 1
                inside = depth(child) + (isinstance(child, blocks) and not other)
                deepest = max(deepest, inside)
    return deepest


def test_classes_have_different_names() -> None:
    names = Counter(
        node.name
        for path in sources()
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == NAMED_TWICE


def test_nothing_is_called_for_its_effect_at_import_time() -> None:
    # But that no foreign package stands where one of ours should, before any is imported.
    allowed = {"trainer/__init__.py: refuse_shadows()"}
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
    heavy = ("torch", "torchvision", "sklearn", "tensorboard")
    code = f"import sys, {module}; print(*(m for m in {heavy!r} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == ""
