"""What `regimen demo` answers for each kind of task: masks, labels, rows of a table, text."""

import io
import json
from base64 import b64decode
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image

from browser import Browser, installed
from conf.errors import ConfigError
from demo_server import digit, encoded
from scripts.serving.answers import Answerer
from scripts.serving.intake import UploadError
from trainer import load_run


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    """Train one update of an experiment and open the run."""

    def run(experiment, *more):
        path = tmp_path_factory.mktemp("runs") / experiment
        limits = ["trainer.max_steps=1", "loader.num_workers=0", "trainer.limit_val_batches=1"]
        done = train([f"experiment={experiment}", *limits, *more, f"run_dir={path}"])
        assert done.code == 0, done.err
        return load_run(path, "cpu")

    return run


@contextmanager
def answering(run):
    answerer = Answerer(run, "best", 1)
    answerer.open()
    yield answerer
    answerer.close()


def test_a_mask_is_a_picture_with_its_classes(trained):
    run = trained("segmentation")
    picture = encoded(Image.fromarray(np.arange(32 * 32, dtype=np.uint8).reshape(32, 32)))
    with answering(run) as answerer:
        found = answerer(picture, show=True)
    mask = np.array(Image.open(io.BytesIO(b64decode(found["prediction"].partition(",")[2]))))
    (expected,) = run.predict(picture)
    np.testing.assert_array_equal(mask, expected["prediction"])
    shares = {area["name"]: area["share"] for area in found["areas"]}
    names = run.facts.classes
    assert shares == {names[n]: (mask == n).mean() for n in np.unique(mask)}


def test_labels_are_a_set(trained):
    run = trained("multilabel")
    with answering(run) as answerer:
        found = answerer(digit())
        with pytest.raises(UploadError, match="no picture"):
            answerer(b"no")
    del found["milliseconds"]
    assert [found] == run.predict(digit())


@pytest.fixture(scope="module")
def rows(trained, tmp_path_factory):
    """A run on a table of a number, a category and a value."""
    path = tmp_path_factory.mktemp("tables") / "houses.csv"
    lines = [f"{n / 10},{'abc'[n % 3]},{n * (1 + n % 3)}" for n in range(60)]
    path.write_text("\n".join(["size,zone,price", *lines]))
    table = ["data=table", f"data.path={path}", "data.target=price", "data.channels=4"]
    return trained("regression", *table)


@pytest.fixture(scope="module")
def table_site(demo, rows):
    return demo(f"run={rows.path}")


def test_a_row_of_a_table_is_answered_as_predict_does(table_site, rows, predict, tmp_path):
    server = table_site
    (tmp_path / "one.csv").write_text("size,zone\n1.5,b\n")
    done = predict([f"run={rows.path}", "source=one.csv", "out=p.jsonl"], folder=tmp_path)
    assert done.code == 0, done.err
    expected = json.loads((tmp_path / "p.jsonl").read_text())
    status, found = server.predict(b'{"size": 1.5, "zone": "b"}')
    assert (status, found["prediction"]) == (200, pytest.approx(expected["prediction"]))
    _, card = server.ask("/card")
    assert json.loads(card["example"]).keys() == {"size", "zone"}
    assert "size, zone" in card["facts"]["input"]
    for body, code, said in (
        (b"size=1", 415, "no JSON"),
        (b"[1]", 422, "JSON object"),
        (b"[" * 100_000, 415, "no JSON"),
        (b'{"size": 1.5}', 422, "no column 'zone'"),
        (b'{"size": "x", "zone": "b"}', 422, "not a finite number"),
        (b'{"size": [1], "zone": "b"}', 422, "'size'"),
        (b'{"size": null, "zone": "b"}', 422, "no value"),
        (b"", 422, "columns size, zone"),
    ):
        status, found = server.predict(body)
        assert (status, said in found["error"]) == (code, True), found
    assert server.predict(card["example"].encode())[0] == 200


def test_a_prompt_is_continued_as_generate_does(trained):
    run = trained("char_lm", "model.depth=1", "data.context=16")
    asked = {"prompt": "def ", "max_new_tokens": 9, "sampling": "random", "top_k": 5}
    with answering(run) as answerer:
        found = answerer(json.dumps(asked).encode())
        (expected,) = run.generate(
            ["def "], max_new_tokens=9, sampling="random", top_k=5, batch_size=1
        )
        assert (found["prompt"], found["prediction"]) == ("def ", expected)
        assert json.loads(answerer.card()["example"])["prompt"]
        for wrong, said in (
            ({"prompt": 3}, "no text"),
            ({"prompt": "\u00e9"}, "vocabulary"),
            ({"prompt": "a", "max_new_tokens": 10**6}, "from 1 to 1000"),
            ({"prompt": "a", "temperature": 2}, "no effect"),
            ({"prompt": "a", "colour": 1}, "none of prompt, max_new_tokens"),
        ):
            with pytest.raises(UploadError, match=said):
                answerer(json.dumps(wrong).encode())


def test_numbers_are_answered_where_the_data_are_no_pictures(trained):
    run = trained("regression")
    with answering(run) as answerer:
        found = answerer(json.dumps({"input": [0.5] * 10}).encode())
        (expected,) = run.predict(torch.full((1, 10), 0.5))
        assert found["prediction"] == pytest.approx(expected["prediction"])
        for wrong in ("{}", '{"input": "x"}', '{"input": [[1], [1, 2]]}', '{"input": [1, 2]}'):
            with pytest.raises(UploadError) as error:
                answerer(wrong.encode())
            assert error.value.status == 422


def test_a_run_whose_answers_mean_nothing_is_refused(trained):
    run = trained("regression")
    run.facts.outputs["kind"] = "array"
    with pytest.raises(ConfigError, match="says nothing of what its outputs mean"):
        Answerer(run, "best", 1)


@pytest.mark.skipif(installed() is None, reason="no Chromium is installed (apt: chromium)")
def test_a_person_sends_the_row_of_the_example(table_site, tmp_path):
    with Browser(tmp_path / "profile", table_site.url) as browser:
        browser.until("(document.querySelector('#body') || {value: ''}).value !== ''")
        assert browser.value("document.querySelector('#drop').hidden")
        assert '"zone"' in browser.value("document.querySelector('#curl').innerText")
        browser.value("document.querySelector('#json button').click()")
        browser.until(
            "(document.querySelector('#answer p') || {innerText: ''})"
            ".innerText.startsWith('prediction: ')"
        )
        assert browser.errors == []
