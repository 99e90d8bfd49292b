"""New text, as a loop over single prompts writes it; and runs with files that cannot be read."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.data.errors import DataError, UnreadableError
from regimen.data.loading.fetch import collate
from regimen.data.text import ALPHABET, Prompts, find_prompts
from regimen.models.gpt import GPT
from regimen.models.layers import NetworkError
from regimen.models.pretrained import read_weights
from regimen.scripts.cli.keys import Evaluation, read_keys
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.experiment import build
from regimen.trainer.checkpoints.archive import DamagedCheckpointError
from regimen.trainer.checkpoints.reader import model_only
from regimen.trainer.errors import CheckpointError
from regimen.trainer.inference.predictor import (
    Generation,
    inference_metadata,
    read_inference_metadata,
)
from regimen.trainer.inference.run import load_components, load_run, pictures_for
from regimen.trainer.runs.status import RunDirectoryError
from regimen.trainer.tasks.language_model import LanguageModel

CONTEXT = 8
TEXTS = ["a", "def f", "The quick brown fox", "Return", "x" * CONTEXT]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = GPT(len(ALPHABET), context=CONTEXT, dim=16, depth=2, heads=2).double().eval()
    for parameter in net.parameters():
        parameter.data.mul_(4)  # untrained, the network would repeat one character
    return net


def prompts(texts=TEXTS):
    return Prompts([f"p{n}" for n in range(len(texts))], texts, ALPHABET, CONTEXT)


def logits_of(model):
    """Return a function of a batch, as generation takes it."""
    task = LanguageModel(len(ALPHABET))
    return partial(task.prediction_step, model)


def spelled(tokens):
    return "".join(ALPHABET[token] for token in tokens)


@torch.no_grad()
def written(generation, model, numbers=(0, 1, 2, 3, 4)):
    """Return the texts that follow the prompts of the given numbers."""
    dataset = prompts()
    batch = collate([dataset[number] for number in numbers])
    tokens = generation(logits_of(model), batch)
    return [spelled(row) for row in tokens.tolist()]


@torch.no_grad()
def by_hand(model, text, new):
    tokens = [ALPHABET.index(character) for character in text]
    for _ in range(new):
        seen = torch.tensor([tokens[-CONTEXT:]])
        logits = model(seen)[0, -1]
        tokens.append(int(logits.argmax()))
    return spelled(tokens[len(text) :])


def test_the_likeliest_text_is_that_of_a_plain_loop(model):
    found = written(Generation(20), model)
    assert found == [by_hand(model, text, 20) for text in TEXTS]
    assert len(set(found)) > 1


@pytest.mark.parametrize("size", [1, 2, 5], ids=lambda size: f"batch-{size}")
def test_draws_do_not_depend_on_the_batch(model, size):
    generation = Generation(30, "random", temperature=0.9, seed=7)
    of_another_seed = Generation(30, "random", temperature=0.9, seed=8)
    whole = written(generation, model)

    in_parts = []
    for first in range(0, 5, size):
        numbers = range(first, min(first + size, 5))
        in_parts += written(generation, model, numbers)

    assert in_parts == whole
    assert written(of_another_seed, model) != whole


def test_draws_for_equal_prompts_differ(model):
    """They are keyed by the number of the prompt."""
    generation = Generation(30, "random", temperature=0.9, seed=7)
    twins = prompts(["a", "a"])
    with torch.no_grad():
        one, other = generation(logits_of(model), collate([twins[0], twins[1]]))
    assert not torch.equal(one, other)


def test_few_and_cold_draws_are_the_likeliest(model):
    greedy = written(Generation(20), model)
    assert written(Generation(20, "random", top_k=1), model) == greedy
    assert written(Generation(20, "random", temperature=1e-4), model) == greedy


@pytest.mark.parametrize(("top_k", "temperature"), [(None, 1.0), (3, 2.0)])
def test_draws_have_the_shares_of_the_softmax(top_k, temperature):
    logits = torch.tensor([2.0, 0.0, 1.0, -50.0, 1.5])
    count = 1000

    def same_logits(tokens):
        return logits[None, :, None].expand(len(tokens), -1, tokens.shape[1])

    batch = (torch.zeros(1, 4, dtype=torch.long), torch.tensor([1]), torch.tensor([0]))
    (tokens,) = Generation(count, "random", temperature, top_k)(same_logits, batch)

    kept = logits
    if top_k is not None:
        kept = logits.where(logits >= 1.0, -torch.inf)  # the three largest
    expected = (kept / temperature).softmax(0)
    shares = torch.bincount(tokens, minlength=5) / count

    # Four standard deviations of a share: 4 * sqrt(p (1 - p) / n) < 0.064.
    torch.testing.assert_close(shares, expected, atol=0.064, rtol=0)

    possible = expected > 1e-9
    assert (shares[~possible] == 0).all()


def test_a_text_beyond_the_vocabulary_is_named():
    with pytest.raises(UnreadableError, match=r"p1: .*'é→' is not in its vocabulary"):
        prompts(["a", "caf\u00e9 → \u00e9"])[1]


def test_prompts_are_the_lines_of_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two \r\nthree")
    names, texts = find_prompts(str(path))

    assert names == [f"{path}:1", f"{path}:3", f"{path}:4"]
    assert texts in (["one", "  two \r", "three"], ["one", "  two ", "three"])
    assert find_prompts("-", ["a", ""]) == (["-:1"], ["a"])


def test_a_file_of_empty_lines_holds_no_prompt(tmp_path):
    path = tmp_path / "empty"
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no prompt"):
        find_prompts(str(path))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(b"\xff\xfe{{:", "cannot read .*config.yaml: 'utf-8' codec", id="no-text"),
        pytest.param(b"", "config.yaml holds no configuration", id="empty"),
    ],
)
def test_a_damaged_configuration_is_named_with_the_way_out(tmp_path, content, text):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(RunDirectoryError, match=f"{text}.*resume=auto restores it"):
        load_run(tmp_path)


FACTS = {
    "classes": ["a", "b"],
    "num_classes": 2,
    "inputs": {"kind": "picture", "channels": 1, "size": [8, 8]},
    "outputs": {"kind": "classes"},
    "transforms": {},
    "model": {},
}
TABLE = {"kind": "table", "missing": "mean"}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"classes": [1, 2]}, id="numbers as names"),
        pytest.param({"classes": "ab"}, id="text as names"),
        pytest.param({"num_classes": 10**9}, id="a billion classes"),
        pytest.param({"num_classes": True}, id="true classes"),
        pytest.param({"inputs": []}, id="a list as inputs"),
        pytest.param({"inputs": {}}, id="inputs without a kind"),
        pytest.param({"inputs": {"kind": ["picture"]}}, id="a list as kind"),
        pytest.param({"inputs": {"kind": "picture"}}, id="a picture without channels"),
        pytest.param({"inputs": FACTS["inputs"] | {"size": [10**9] * 2}}, id="a huge picture"),
        pytest.param({"inputs": FACTS["inputs"] | {"size": 8}}, id="size as a number"),
        pytest.param({"inputs": TABLE}, id="a table without features"),
        pytest.param({"inputs": TABLE | {"features": ["a"]}}, id="features as texts"),
        pytest.param({"inputs": TABLE | {"features": [{"name": "a"}]}}, id="half a feature"),
        pytest.param(
            {"inputs": {"kind": "text", "context": "8", "encoding": "bytes"}}, id="context"
        ),
        pytest.param({"outputs": None}, id="no outputs"),
        pytest.param({"outputs": {"kind": "values", "scale": [1]}}, id="half a scale"),
        pytest.param({"outputs": {"kind": "labels", "threshold": "x"}}, id="threshold as text"),
        pytest.param({"model": "Net"}, id="model as text"),
    ],
)
def test_facts_of_another_form_are_damaged(tmp_path, change):
    path = tmp_path / "inference.json"
    path.write_text(json.dumps(FACTS))
    assert read_inference_metadata(tmp_path).classes == ["a", "b"]

    path.write_text(json.dumps(FACTS | change))
    told = r"inference\.json is missing or damaged \("
    with pytest.raises(RunDirectoryError, match=told) as caught:
        read_inference_metadata(tmp_path)
    assert len(str(caught.value)) < 500


def test_for_a_damaged_checkpoint_the_others_are_named(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("best", "last", "step-00000005"):
        (folder / f"{name}.pt").write_bytes(b"x")
    with pytest.raises(DamagedCheckpointError, match="=NAME takes another of best, last, step-0"):
        load_components(tmp_path, None, None, None, "best")


def test_a_run_with_a_link_that_leads_out_is_not_opened(tmp_path):
    secret = tmp_path / "secret.pt"
    torch.save({"model": {"w": torch.zeros(1)}}, secret)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("name: x\n")
    (run / "checkpoints/best.pt").symlink_to(secret)

    with pytest.raises(RunDirectoryError, match=r"best\.pt is a link that leads out"):
        load_run(run)
    with pytest.raises(RunDirectoryError, match=r"best\.pt is a link that leads out"):
        read_keys(Evaluation, [f"run={run}"])
    with pytest.raises(CheckpointError, match="is a link that leads out"):
        model_only(run)
    with pytest.raises(NetworkError, match="is a link that leads out"):
        read_weights(str(run))


def test_the_data_of_a_run_are_at_an_address_that_is_opened(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {train: {root: 'sftp://host/x'}}\n")
    with pytest.raises(ConfigError, match=r"data\.train\.root: 'sftp://host/x': sftp://"):
        load_run(tmp_path)


OWN_MASKS = """
import numpy as np, torch
from pathlib import Path
from PIL import Image
class Own:
    def __init__(self, root, kind, transform=None):
        self.files = sorted(Path(root, "images").glob("*.png"))
        self.kind, self.transform = kind, transform
    def __len__(self):
        return len(self.files)
    def __getitem__(self, index):
        path = self.files[index]
        image, mask = Image.open(path), Image.open(path.parents[1] / "masks" / path.name)
        image = np.array(image) if self.kind == "array" else image
        mask = torch.from_numpy(np.array(mask)).long()
        if self.kind == "joint":
            return self.transform((image, mask))
        return self.transform(image), mask
class Joint:
    def __call__(self, sample):
        if isinstance(sample, tuple):
            return self(sample[0]), sample[1]
        values = torch.from_numpy(np.array(sample)) if not torch.is_tensor(sample) else sample
        return (values if values.ndim == 3 else values[None]).float() / 255
"""


def write_picture(path, seed, most):
    """Write 8 x 8 random numbers below `most` as a picture of one channel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.RandomState(seed).randint(0, most, (8, 8))
    Image.fromarray(values.astype(np.uint8)).save(path)


def words_of_masks(root, kind):
    """Return the words that choose the data: folders of masks, or a data set of one's own."""
    words = [
        "--allow-target",
        "own_masks",
        "experiment=segmentation",
        "data=mask_folder",
        f"data.root={root}",
        "data.num_classes=3",
        "data.image_size=null",
        "data.channels=1",
        "data.mean=[0.5]",
        "data.std=[0.5]",
        "transforms=none",
        "transforms.train={f: {_target_: own_masks.Joint}}",
        "transforms.eval={f: {_target_: own_masks.Joint}}",
    ]
    if kind != "mask_folder":
        for split in ("train", "val"):
            place = root / split
            words.append(f"data.{split}={{_target_: own_masks.Own, root: {place}, kind: {kind}}}")
    return words


@pytest.mark.parametrize("kind", ["mask_folder", "picture", "array", "joint"])
def test_a_run_with_masks_is_asked_about_files(tmp_path, monkeypatch, kind):
    for split in ("train", "val"):
        for number in range(4):
            write_picture(tmp_path / split / "images" / f"{number}.png", number, 256)
            write_picture(tmp_path / split / "masks" / f"{number}.png", number, 3)
    (tmp_path / "own_masks.py").write_text(OWN_MASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = parse(compose(words_of_masks(tmp_path, kind)).config)
    experiment = build(config)
    facts = inference_metadata(config, experiment.data, experiment.trainer.task)

    files = [str(tmp_path / "val" / "images" / f"{number}.png") for number in range(4)]
    asked = pictures_for(facts, config, files)

    val = experiment.data.sets["val"]

    for number in range(4):
        image, _ = val[number]
        assert torch.equal(asked[number], image)
