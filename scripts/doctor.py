"""`regimen doctor`: whether this machine can train, a line for each part and its cure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.checkup.finding import Check, Finding, checked
from scripts.checkup.machine import machine_checks
from scripts.checkup.pair import pair
from scripts.cli.arguments import command_parser, parse_command
from scripts.cli.console import importing
from trainer.files.log_format import on_one_line


def doctor(argv: Sequence[str]) -> int:
    """Look at everything; return 0, or 8 where something has a cure."""
    parser = command_parser("regimen doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="for machines: a list of objects")
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    findings = []
    for finding in _findings(Path.cwd()):
        findings.append(finding)
        if not arguments.json:
            print(_line(finding), flush=True)
    bad = sum(not finding.good for finding in findings)
    if arguments.json:
        print(json.dumps([asdict(finding) | {"good": finding.good} for finding in findings]))
    else:
        print("all is well" if not bad else f"to look at: {bad} of {len(findings)}")
    return 8 if bad else 0


def _findings(folder: Path) -> Iterator[Finding]:
    yield from checked(machine_checks(folder))
    with importing():
        from scripts.checkup.devices import device_checks, gpu_count
    yield from checked(device_checks())
    pairs: dict[str, Check] = {"gloo": lambda: pair("gloo")}
    if gpu_count() > 1:
        pairs["nccl"] = lambda: pair("nccl")
    yield from checked(pairs)


def _line(finding: Finding) -> str:
    mark = "good" if finding.good else "WARN"
    cure = f"; cure: {finding.cure}" if finding.cure else ""
    return on_one_line(f"{mark}  {finding.name:<20} {finding.text}{cure}")
