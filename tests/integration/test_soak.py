"""A run that is killed again and again ends as if nothing had happened; and it would be noticed."""

import json
import shutil

import pytest
import torch

from same_run import differences, repeated_steps
from soak import soak


@pytest.mark.slow
def test_five_kills_lose_nothing(tmp_path):
    tally = soak(tmp_path, kills=5, seed=1)
    assert tally.kills == 5
    assert tally.loads_of_last > 0
    assert tally.steps == sorted(tally.steps)
    controls(tmp_path)


def controls(folder):
    """Show that the comparison sees each kind of loss; a blind one would prove nothing."""
    whole, killed = folder / "whole", folder / "killed"
    assert differences(whole, killed) == []
    for name, spoil in {
        "buffers": lambda c: c["model"]["features.0.bn.running_mean"].add_(1e-6),
        "weights": lambda c: c["model"]["head.weight"].view(-1)[3].mul_(1 + 1e-6),
        "rng": lambda c: c["rng"][0]["torch"].__setitem__(5, c["rng"][0]["torch"][5] ^ 1),
        "position": lambda c: c["state"]["counters"].update(updates=1),
        "ema": lambda c: c.update(ema={}),
    }.items():
        copy = folder / name
        shutil.copytree(killed, copy)
        last = copy / "checkpoints" / "last.pt"
        content = torch.load(last, weights_only=True)
        spoil(content)
        (copy / "checkpoints" / "index.json").unlink()
        torch.save(content, last)
        assert differences(whole, copy), name
    metrics = killed / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines, lines[-1]]) + "\n")
    assert repeated_steps(killed)
    assert any("metrics.jsonl" in text for text in differences(whole, killed))
    changed = {**json.loads(lines[0]), "train/loss": 0.0}
    metrics.write_text("\n".join([json.dumps(changed), *lines[1:]]) + "\n")
    assert any("line 1" in text for text in differences(whole, killed))
