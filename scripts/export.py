"""`regimen export` and `regimen quantize`: a trained model as a file for other programs."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regimen.scripts.cli.console import importing
from regimen.scripts.cli.keys import (
    Export,
    OutputOptions,
    Quantization,
    loaded_run,
    read_keys,
)


def export(argv: Sequence[str]) -> int:
    """Run `regimen export`, return its exit code."""
    options = _parse(Export, argv)
    with importing():
        from regimen.trainer.export.artefact import export_run
        from regimen.trainer.export.formats import how_to_load

    path, facts = export_run(name=options.pop("format"), **options)
    for note in facts.get("notes", ()):
        print(f"note: {note}", file=sys.stderr)
    print(*how_to_load(facts, path.parent), sep="\n")
    difference = facts["verified"]["largest_difference"]
    print(f"written to {path} (largest difference to the model: {difference:.2g})")
    return 0


def quantize(argv: Sequence[str]) -> int:
    """Run `regimen quantize`, return its exit code."""
    options = _parse(Quantization, argv)
    with importing():
        from regimen.trainer.export.quantization import quantize_run

    path, facts = quantize_run(**options)
    titles = {"megabytes": "size, MB", "ms_of_1": "1 sample, ms", "ms_of_32": "32 samples, ms"}
    print(f"{'':<16}{'before':>10}{'after':>10}")
    for name, before in facts["before"].items():
        print(f"{titles.get(name, name):<16}{before:>10.4g}{facts['after'][name]:>10.4g}")
    quantization = facts["quantization"]
    print(f"written to {path} ({quantization['method']}, ranges {quantization['ranges']})")
    return 0


def _parse(command: type[OutputOptions], argv: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a command line, and the run itself in place of its path."""
    keys, arguments = read_keys(command, argv)
    run = loaded_run(keys, "cpu", arguments)
    return asdict(keys) | {"run": run, "out": Path(keys.out) if keys.out else None}
