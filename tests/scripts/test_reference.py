"""The documentation says what the schema says."""

import re

from conf.schema import Config
from scripts.reference import DOCUMENT, updated


def test_the_table_of_keys_is_fresh() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert updated(text) == text, "python -m scripts.reference"


def test_every_section_has_a_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([\w.]+)` ", text, re.M))
    assert set(Config.__dataclass_fields__) <= rows
    assert {"trainer.max_epochs", "strategy.devices", "loader.eval.timeout", "optimizer.lr"} <= rows
