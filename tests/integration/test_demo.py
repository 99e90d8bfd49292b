"""`regimen demo`: the page answers as `run.predict` does, with the checkpoint's figures."""

import http.client
import importlib.util
import signal
import socket

import pytest
import torch
from PIL import Image

from scripts.demo import page_of
from trainer import load_run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="the extra demo is not installed"
)


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


def test_the_page_answers_and_shows_its_checkpoint(whole, tmp_path):
    run = load_run(whole, "cpu")
    Image.new("L", (9, 9), 100).save(tmp_path / "a.png")
    step = whole / "checkpoints" / "step-00000020.pt"
    page = page_of(run, str(step), 3)
    (row,) = run.predict([tmp_path / "a.png"], top_k=3, checkpoint=str(step))
    found = page.fn(str(tmp_path / "a.png"))
    assert found == {
        row[k]: row[p]
        for k, p in zip(
            ("prediction", "top2", "top3"),
            ("probability", "probability2", "probability3"),
            strict=True,
        )
    }
    (logged,) = [n["val/accuracy"] for n in run.metrics if n["step"] == 20 and "val/accuracy" in n]
    assert "step-00000020.pt, step 20" in page.article
    assert f"val/accuracy {logged:.4f}" in page.article
    (tmp_path / "b.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(Exception, match="no image format"):
        page.fn(str(tmp_path / "b.png"))


def test_other_tasks_answer_in_their_own_form(trained, tmp_path):
    Image.new("L", (32, 32), 100).save(tmp_path / "a.png")
    masks = page_of(trained("segmentation"), "best", 1).fn(str(tmp_path / "a.png"))
    assert masks.size == (32, 32)
    labels = page_of(trained("multilabel"), "best", 1).fn(str(tmp_path / "a.png"))
    assert all(0 <= share <= 1 for share in labels.values())
    text = trained("char_lm", "model.dim=16", "model.depth=1", "data.context=32")
    assert len(page_of(text, "best", 1).fn("The ", 5)) == 9
    run = trained("regression")
    sample = torch.zeros(run.model().in_features if hasattr(run.model(), "in_features") else 10)
    assert page_of(run, "best", 1).fn(sample.tolist()) == run.predict([sample])[0]


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
    assert running.wait().code == 143
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"port={listener.getsockname()[1]}"
        used = start([f"run={whole}", taken], command="demo").wait(120)
    assert used.code == 2
    assert "port=0 takes one that is free" in used.error
