"""The nodes of a configuration whose targets are called with something that we make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.lr_schedulers.nodes import target_nodes as schedule_nodes
from trainer.optimizers.nodes import sections


def optimizer_nodes(node: Mapping[str, Any], key: str = "optimizer") -> dict[str, dict[str, Any]]:
    """Return, by config key, the nodes whose targets get one positional argument from us.

    Keys of ours (`param_groups`, ...) are left out and shared hyper-parameters filled in, so that
    the nodes can be held against the signatures of their targets. Schedules of single optimizers
    are among them.
    """
    found = sections(node, key, [])
    nodes = {s.key: s.target for s in found if "_target_" in s.target}
    for section in found:
        nodes |= schedule_nodes(section.own["lr_scheduler"], f"{section.key}.lr_scheduler")
    return nodes
