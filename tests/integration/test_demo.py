"""`regimen demo`: a page and a JSON address that answer as `run.predict` does, whatever comes."""

import http.client
import io
import re
import signal
import socket
import threading
import zlib
from base64 import b64decode
from pathlib import Path

import pytest
from PIL import Image

from browser import Browser, installed
from demo_server import digit, encoded
from scripts.serving.app import MAX_BYTES, MAX_WAITING
from trainer import load_run


@pytest.fixture(scope="module")
def site(demo, whole):
    return demo(f"run={whole}")


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
