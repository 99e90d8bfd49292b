"""What is used of Hydra beyond its public names: a change there is told here, by its name."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

ROOM = Path(__file__).resolve().parents[3] / "scripts" / "composition"
# Module and name within `hydra._internal` -> what is used of it, with its parameters.
USED = {
    "config_loader_impl.ConfigLoaderImpl": {
        "_compose_config_from_defaults_list": ["self", "defaults", "repo"],
        "get_sources": ["self"],
    },
    "config_repository.CachingConfigRepository": {
        "__init__": ["self", "delegate"],
        "get_sources": ["self"],
        "group_exists": ["self", "config_path"],
        "config_exists": ["self", "config_path"],
        "get_group_options": ["self", "group_name", "results_filter"],
    },
    "config_search_path_impl.ConfigSearchPathImpl": {
        "append": ["self", "provider", "path", "anchor"],
    },
    "core_plugins.file_config_source.FileConfigSource": {
        "__init__": ["self", "provider", "path"],
        "load_config": ["self", "config_path"],
        "is_group": ["self", "config_path"],
        "is_config": ["self", "config_path"],
        "_normalize_file_name": ["filename"],
    },
    "defaults_list.DefaultsList": {
        "__init__": ["self", "defaults", "defaults_tree", "config_overrides", "overrides"],
    },
    "defaults_list.create_defaults_list": {
        "": ["repo", "config_name", "overrides_list", "prepend_hydra", "skip_missing"],
    },
    "hydra.Hydra": {
        "create_main_hydra2": ["task_name", "config_search_path"],
        "shell_completion": ["self", "config_name", "overrides"],
        "show_cfg": ["self", "config_name", "overrides", "cfg_type", "package", "resolve"],
        "show_info": ["self", "info", "config_name", "overrides", "run_mode"],
        "hydra_help": ["self", "config_name", "args_parser", "args"],
    },
    "sources_registry.SourcesRegistry": {"instance": None, "register": ["self", "type_"]},
    "utils.get_args_parser": {"": []},
}


def imported() -> set[str]:
    """Return the names that the room imports of `hydra._internal`."""
    prefix = "hydra._internal."
    return {
        f"{node.module.removeprefix(prefix)}.{alias.name}"
        for path in ROOM.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix)
        for alias in node.names
    }


def test_the_table_lists_what_is_imported() -> None:
    assert imported() == set(USED)


@pytest.mark.parametrize("path", USED)
def test_hydra_still_has_what_is_used(path: str) -> None:
    module, _, name = path.rpartition(".")
    thing = getattr(importlib.import_module(f"hydra._internal.{module}"), name)
    for method, parameters in USED[path].items():
        used = getattr(thing, method) if method else thing
        assert callable(used)
        if parameters is not None:
            assert list(inspect.signature(used).parameters) == parameters, method
