"""Build objects from nodes, and list the nodes of optimizers and schedules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from conf.errors import ConfigError, Problem, raise_problems
from data.errors import DataError
from trainer.build.node_kinds import wrong_object
from trainer.lr_schedulers.nodes import target_nodes as schedule_nodes
from trainer.optimizers.nodes import sections
from trainer.targets.allow_list import TargetError
from trainer.targets.instantiate import instantiate


def build_node(node: dict[str, Any], key: str) -> Any:
    """Build what a node describes. Raises ConfigError, also if it does not fit `key`."""
    try:
        made = instantiate(node, _key_=key)
    except DataError as error:  # about an argument, as no data are open
        raise TargetError(Problem(key, str(error))) from error
    if (reason := wrong_object(key, made)) is not None:
        raise TargetError(Problem(f"{key}._target_", reason))
    return made


def build_named(nodes: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Build named nodes; null becomes None. Raises one ConfigError for all of them."""
    made: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, node in nodes.items():
        try:
            made[name] = build_node(node, f"{key}.{name}") if node else None
        except ConfigError as error:
            problems += error.problems
    raise_problems(problems)
    return made


def with_classes(node: dict[str, Any], num_classes: int | None) -> dict[str, Any]:
    """Return `node` with each `num_classes: null` replaced by the data's number of classes."""
    filled: dict[str, Any] = copy.deepcopy(node)
    pending: list[Any] = [filled]
    while pending:
        child = pending.pop()
        if isinstance(child, dict) and child.get("num_classes", 0) is None:
            child["num_classes"] = num_classes
        pending += (
            child.values() if isinstance(child, dict) else child if isinstance(child, list) else []
        )
    return filled


def optimizer_nodes(node: Mapping[str, Any], key: str = "optimizer") -> dict[str, dict[str, Any]]:
    """Return, by config key, the nodes of optimizers and of schedules of single optimizers.

    Their targets get one more positional argument. Keys that are not arguments (`param_groups`,
    ...) are left out and shared hyper-parameters filled in, so that the nodes can be checked
    against signatures.
    """
    found = sections(node, key, [])
    nodes = {s.key: s.target for s in found if "_target_" in s.target}
    for section in found:
        nodes |= schedule_nodes(section.own["lr_scheduler"], f"{section.key}.lr_scheduler")
    return nodes
