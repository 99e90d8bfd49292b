"""`regimen demo`: a page and a JSON address that answer as `run.predict` does, whatever comes."""

import http.client
import io
import json
import re
import signal
import socket
import threading
import zlib
from base64 import b64decode
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from browser import Browser, installed
from conf.errors import ConfigError
from scripts.serving.answers import Answerer
from scripts.serving.app import MAX_BYTES, MAX_WAITING
from scripts.serving.intake import UploadError
from trainer import load_run


class Server:
    """A demo that runs, and requests to it."""

    def __init__(self, running):
        self.running = running
        running.until(lambda: "Ctrl-C" in running.out)
        self.url = running.out.splitlines()[0]
        found = re.fullmatch(r"http://([^/]+):(\d+)/(?:\?token=([\w-]+))?", self.url)
        self.port, self.token = int(found[2]), found[3]

    def ask(self, path, body=None, **headers):
        """Return status and JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET" if body is None else "POST", path, body, sent)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def predict(self, body, query="", **headers):
        return self.ask(f"/predict{query}", body, **headers)


@pytest.fixture(scope="module")
def demo(start):
    """Start `regimen demo ARGUMENTS` on a free port."""
    return lambda *arguments: Server(start([*arguments, "port=0"], command="demo"))


@pytest.fixture(scope="module")
def predict(start):
    return lambda arguments, **options: start(arguments, command="predict", **options).wait()


@pytest.fixture(scope="module")
def site(demo, whole):
    return demo(f"run={whole}")


def digit(number=3):
    pixels = np.round(load_digits().images[number] * 255 / 16).astype(np.uint8)
    return encoded(Image.fromarray(pixels))


def encoded(picture, form="PNG"):
    file = io.BytesIO()
    picture.save(file, form)
    return file.getvalue()


def enormous():
    """A PNG whose header promises 30,000 x 30,000 pixels."""

    def chunk(kind, data):
        content = kind + data
        return len(data).to_bytes(4) + content + zlib.crc32(content).to_bytes(4)

    size = (30_000).to_bytes(4)
    rows = zlib.compress(bytes(30_001) * 10)
    header = chunk(b"IHDR", size + size + bytes([8, 0, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def alive(site):
    return site.predict(digit())[0] == 200


def test_the_answer_is_that_of_predict(site, whole):
    run = load_run(whole, "cpu")
    for picture in (digit(3), digit(8), encoded(Image.new("RGB", (90, 60), "red"), "WEBP")):
        status, found = site.predict(picture, "?top_k=3")
        assert status == 200
        times = found.pop("milliseconds")
        assert set(times) == {"read", "model"}
        assert [found] == run.predict(picture, top_k=3)


def test_the_page_is_one_file_and_the_card_is_the_runs(site):
    connection = http.client.HTTPConnection("127.0.0.1", site.port)
    connection.request("GET", "/")
    answer = connection.getresponse()
    page = answer.read().decode()
    connection.close()
    assert answer.status == 200
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert re.findall(r"(?:src|href)\s*=\s*[\"']", page) == []  # it asks for no other file
    status, card = site.ask("/card")
    assert status == 200
    assert card["kind"] == "classes"
    assert card["facts"]["classes"] == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert card["facts"]["checkpoint"].endswith("average ema")


def test_what_the_network_was_given_is_shown_on_request(site):
    _, found = site.predict(digit(), "?show=true")
    shown = Image.open(io.BytesIO(b64decode(found["input"].partition(",")[2])))
    assert shown.size == (16, 16)
    assert shown.getextrema() == (0, 255)


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        pytest.param(b"hello", {}, 415, "no picture", id="text"),
        pytest.param(b"%!PS-Adobe-3.0 EPSF-3.0\n", {}, 415, "no picture", id="a-program"),
        pytest.param(
            b"--x--", {"Content_Type": "multipart/form-data"}, 415, "--data-binary", id="form"
        ),
        pytest.param(b"", {}, 422, "no body", id="nothing"),
        pytest.param(digit()[:70], {}, 422, "truncated", id="torn"),
        pytest.param(enormous(), {}, 422, "40,000,000 pixels", id="bomb"),
        pytest.param(bytes(MAX_BYTES + 1), {}, 413, "20,000,000 bytes", id="large"),
        pytest.param(
            b"", {"Content_Length": "200000000", "Expect": "100-continue"}, 413, "bytes", id="told"
        ),
        pytest.param(digit(), {"Host": "evil.example"}, 403, "evil.example", id="rebinding"),
        pytest.param(digit(), {"Host": "[1"}, 403, "Host", id="no-host"),
        pytest.param(digit(), {"Origin": "http://evil.example"}, 403, "page", id="foreign-page"),
    ],
)
def test_a_bad_upload_has_a_clear_answer(site, body, headers, status, said):
    found = site.predict(body, **headers)
    assert found[0] == status, found
    assert said in found[1]["error"]
    assert "\n" not in found[1]["error"]
    assert alive(site)


def test_chunks_are_counted_and_two_hundred_megabytes_are_not_kept(site):
    def kilobytes():
        for _ in range(200):
            yield bytes(1_000_000)

    before = memory(site)
    status, found = site.predict(kilobytes())
    assert status == 413, found
    assert memory(site) - before < 60_000  # KiB
    assert alive(site)


def memory(site):
    text = Path(f"/proc/{site.running.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        pytest.param("/nothing", None, 404, id="path"),
        pytest.param("/../pyproject.toml", None, 404, id="file"),
        pytest.param("/predict", None, 405, id="method"),
        pytest.param("/predict?top_k=0", b"x", 422, id="top-k"),
    ],
)
def test_other_addresses_are_named(site, path, body, status):
    found = site.ask(path, body)
    assert found[0] == status
    assert isinstance(found[1]["error"], str)


def test_a_hundred_at_once_are_answered_or_refused_and_it_lives(site):
    picture = encoded(Image.new("L", (2000, 2000)))
    answers, together = [], threading.Barrier(100)

    def ask():
        together.wait()
        answers.append(site.predict(picture))

    threads = [threading.Thread(target=ask) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = [status for status, _ in answers]
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= MAX_WAITING
    assert all("later" in found["error"] for status, found in answers if status == 503)
    assert alive(site)


def test_who_breaks_off_leaves_nothing(site):
    for _ in range(2 * MAX_WAITING):
        with socket.create_connection(("127.0.0.1", site.port)) as connection:
            connection.sendall(
                b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\nabc"
            )
    site.running.until(lambda: alive(site))


def test_elsewhere_a_token_is_asked_for(demo, whole):
    server = demo(f"run={whole}", "host=0.0.0.0")
    assert len(server.token) > 20
    for path in ("/", "/card", "/card?token=", "/card?token=%C3%A9"):
        assert server.ask(path)[0] == 401
    assert server.predict(digit(), Authorization="Bearer wrong")[0] == 401
    assert server.predict(digit(), Authorization=f"Bearer {server.token}")[0] == 200
    assert server.predict(digit(), f"?token={server.token}", Host="any.example")[0] == 200
    assert server.running.out.count(server.token) == 1
    assert server.token not in server.running.err
    server.running.send(signal.SIGTERM)
    assert server.running.wait().code == 143
    assert "Traceback" not in server.running.err


def test_ctrl_c_ends_it(demo, whole):
    server = demo(f"run={whole}")
    server.running.send(signal.SIGINT)
    assert server.running.wait().code == 130
    (first,) = server.running.err.splitlines()
    assert first.startswith("regimen ")


def test_a_port_in_use_and_mistakes_are_told_at_once(start, site, whole):
    wanted = [
        ([f"run={whole}", f"port={site.port}"], "port=0 takes one that is free"),
        ([f"run={whole}", "port=x", "top_k=0", "hots=1"], "host"),
        (["port=0"], "run: missing"),
        ([f"run={whole}", "host=no.such.name.invalid"], "host"),
    ]
    for arguments, said in wanted:
        done = start(arguments, command="demo").wait()
        assert done.code == 2, done.err
        assert said in done.err
        assert "Traceback" not in done.err


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
def test_a_person_draws_a_digit_and_chooses_a_file(site, whole, tmp_path):
    run = load_run(whole, "cpu")
    (tmp_path / "digit.png").write_bytes(digit(8))
    with Browser(tmp_path / "profile", site.url) as browser:
        browser.until("document.querySelectorAll('#facts dt').length > 5")
        left, top, side = browser.value(
            "(r => [r.left, r.top, r.width])(document.querySelector('canvas')"
            ".getBoundingClientRect())"
        )
        browser.draw([(left + side / 2, top + side * share / 8) for share in range(1, 8)])
        names = (
            "[...document.querySelectorAll('#answer .row > :first-child')].map(e => e.innerText)"
        )
        browser.until(f"{names}.length === 5")
        picture = browser.value("document.querySelector('canvas').toDataURL()")
        (row,) = run.predict(b64decode(picture.partition(",")[2]), top_k=5)
        assert browser.value(names) == [row["prediction"], *(row[f"top{k}"] for k in range(2, 6))]
        root = browser.ask("DOM.getDocument")["root"]["nodeId"]
        node = browser.ask("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        browser.ask("DOM.setFileInputFiles", files=[str(tmp_path / "digit.png")], nodeId=node)
        (row,) = run.predict(digit(8), top_k=1)
        share = "document.querySelector('#answer .row > :last-child').innerText"
        browser.until(f"{share} === '{100 * row['probability']:.1f}%'")
        (tmp_path / "text").write_text("no picture")
        browser.ask("DOM.setFileInputFiles", files=[str(tmp_path / "text")], nodeId=node)
        browser.until("document.querySelector('#answer .error') !== null")
        assert browser.errors == []


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
