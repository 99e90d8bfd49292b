"""`regimen demo`: the page answers as `run.predict` does, with the checkpoint's figures."""

import http.client
import importlib.util
import signal
import socket

import pytest
import torch
from PIL import Image

from regimen import load_run
from regimen.scripts.demo import page_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="the extra demo is not installed"
)


def test_the_page_answers_and_shows_its_checkpoint(whole, tmp_path):
    run = load_run(whole, "cpu")
    Image.new("L", (9, 9), 100).save(tmp_path / "a.png")
    step = whole / "checkpoints" / "step-00000020.pt"
    page = page_of(run, str(step), 3)
    (row,) = run.predict([tmp_path / "a.png"], top_k=3, checkpoint=str(step))
    answer = {row["prediction"]: row["probability"]}
    answer |= {row[f"top{place}"]: row[f"probability{place}"] for place in (2, 3)}
    assert page.fn(str(tmp_path / "a.png")) == answer
    (logged,) = [n["val/accuracy"] for n in run.metrics if n["step"] == 20 and "val/accuracy" in n]
    assert "step-00000020.pt, step 20" in page.article
    assert f"val/accuracy {logged:.4f}" in page.article
    (tmp_path / "b.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(Exception, match="no image format"):
        page.fn(str(tmp_path / "b.png"))


def test_other_tasks_answer_in_their_own_form(of_experiment, tmp_path):
    def page(*of):
        return page_of(load_run(of_experiment(*of), "cpu"), "best", 1)

    Image.new("L", (32, 32), 100).save(tmp_path / "a.png")
    assert page("segmentation").fn(str(tmp_path / "a.png")).size == (32, 32)
    labels = page("multilabel").fn(str(tmp_path / "a.png"))
    assert all(0 <= share <= 1 for share in labels.values())
    text = page("char_lm", "model.dim=16", "model.depth=1", "data.context=32")
    assert len(text.fn("The ", 5)) == 9
    sample = torch.zeros(10)
    (answer,) = load_run(of_experiment("regression"), "cpu").predict([sample])
    assert page("regression").fn(sample.tolist()) == answer


def test_it_listens_to_names_of_this_machine_until_a_signal(start, whole):
    running = start([f"run={whole}", "port=0"], command="demo")
    running.until(lambda: "Ctrl-C" in running.out, seconds=120)
    port = int(running.out.split(":")[2].split("/")[0])
    for name, status in ((f"127.0.0.1:{port}", 200), ("evil.example", 400)):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/config", headers={"Host": name})
        assert connection.getresponse().status == status
        connection.close()
    running.send(signal.SIGTERM)
    running.wait(143)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"port={listener.getsockname()[1]}"
        used = start([f"run={whole}", taken], command="demo").wait(2, 120)
    assert "port=0 takes one that is free" in used.error
