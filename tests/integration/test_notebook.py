"""The notebook of the documentation runs, and ends where it says."""

import ast
import json
import os
from pathlib import Path

import pytest

from scripts import composition
from scripts.composition import compose

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell["outputs"] for cell in found["cells"] if cell["cell_type"] == "code")
    return ["".join(c["source"]) for c in found["cells"] if c["cell_type"] == "code"]


def run_notebook(place: Path) -> None:
    """Run the cells one after the other, as a kernel does, and check what they end with."""
    names: dict[str, object] = {}
    values = []
    for cell in cells():
        *statements, last = ast.parse(cell).body
        assert isinstance(last, ast.Expr)
        exec(compile(ast.Module(statements, []), "notebook", "exec"), names)
        values.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))
    assert values[0] == 0
    assert [epoch for epoch, _ in values[1]] == [1, 2, 3]
    assert values[2][0][1:] == (1, 16, 16)
    assert sum(int(said) == label for said, label in values[3]) >= 6
    assert 0.5 < values[4] <= 1
    assert type(values[5]).__name__ == "MLP"
    assert [path.name for path in place.iterdir()] == ["runs"]


def test_the_notebook_runs(server, tmp_path) -> None:
    process = server.Process(target=_in_folder, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == 0


def _in_folder(place: Path) -> None:
    os.chdir(place)
    run_notebook(place)


@pytest.mark.parametrize("again", range(2))
def test_compose_is_a_function_of_its_package(again: int) -> None:
    from scripts.composition import compose as imported

    assert imported(["seed=3"]).config["seed"] == 3
    assert compose is composition.compose
