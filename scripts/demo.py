"""`regimen demo run=RUN_DIR`: a page on this machine that shows what a trained model answers."""

import importlib
import importlib.util
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, Problem, raise_problems
from scripts.cli.arguments import Take, one_of, parse_or_help, take_keys, whole
from scripts.cli.console import asked_device, exit_code, greet, importing, log_to_stderr
from scripts.cli.signals import StoppedEarlyError

_HELP = """\
Show a trained model: a page (of gradio) where one drops a picture, or types a row of a table, a
prompt or numbers, and the answer stands beside it. The page names its own JSON address.

  regimen demo run=RUN_DIR [key=value ...]

  port           8000; 0 takes one that is free
  host           127.0.0.1. Any other than this machine's own, such as 0.0.0.0, asks for the name
                 and the password that are printed with the address
  checkpoint     best (default), last, or a path
  top_k          5; how many of the likeliest classes are shown
  device         auto (default), cpu, cuda, mps
"""
_LOCAL = ("127.0.0.1", "localhost", "::1")


def demo(argv: Sequence[str]) -> int:
    """Do what a command line asks for; torch is imported once its keys are sound."""
    if (arguments := parse_or_help(argv, _HELP)) is None:
        return 0
    greet(asked_device(arguments.overrides, "device"))
    log_to_stderr(verbose=True)
    keys: dict[str, Take] = {
        "run": str,
        "port": whole(0, 65535),
        "host": str,
        "checkpoint": str,
        "top_k": whole(),
        "device": one_of("auto", "cpu", "cuda", "mps"),
    }
    required = {"run": "regimen demo run=RUN_DIR"}
    values, _, problems = take_keys(arguments.overrides, keys, required, "demo")
    if importlib.util.find_spec("gradio") is None:
        problems.append(Problem("", "demo needs gradio", "pip install -e '.[demo]'"))
    raise_problems(problems)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio's own, read when it is imported
    with importing():
        from trainer.inference.run import load_run

    for name in ("httpx", "httpx2"):  # a line for each request of gradio to itself
        logging.getLogger(name).setLevel(logging.WARNING)
    host, port = values.get("host", "127.0.0.1"), values.get("port", 8000)
    run = load_run(values["run"], values.get("device", "auto"), arguments.allow_targets)
    page = page_of(run, values.get("checkpoint", "best"), values.get("top_k", 5))
    try:
        serve(page, host, port)
        threading.Event().wait()
    except (StoppedEarlyError, KeyboardInterrupt) as error:
        return exit_code(error)
    finally:
        page.close(verbose=False)
    return 0


def serve(page: Any, host: str, port: int) -> None:
    """Serve a page and print its address. Raises ConfigError where the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as listener:
            port = int(listener.getsockname()[1])
    except OSError as error:
        key = "host" if isinstance(error, socket.gaierror) else "port"
        message = f"cannot listen on {host}:{port}: {error.strerror}"
        raise ConfigError(Problem(key, message, "port=0 takes one that is free")) from error
    login = None if host in _LOCAL else ("demo", secrets.token_urlsafe(16))
    starlette: Any = importlib.import_module("starlette.middleware")
    hosts = importlib.import_module("starlette.middleware.trustedhost").TrustedHostMiddleware
    # A foreign page's requests to 127.0.0.1 carry its name in Host (DNS rebinding).
    only = starlette.Middleware(hosts, allowed_hosts=["*"] if login else [*_LOCAL, host])
    page.launch(
        server_name=host,
        server_port=port,
        auth=login,
        share=False,
        ssr_mode=False,
        max_file_size="20mb",
        app_kwargs={"middleware": [only]},
        prevent_thread_lock=True,
        quiet=True,
    )
    print(f"http://{host}:{port}/" + (f" (name {login[0]}, password {login[1]})" if login else ""))
    print("Ctrl-C ends it", flush=True)


def page_of(run: Any, checkpoint: str, top_k: int) -> Any:
    """Return gradio's page for a run: what it is asked, its answer, and what it is."""
    gradio: Any = importlib.import_module("gradio")

    from trainer.export.card import provenance

    facts, origin = run.facts, provenance(run, checkpoint)

    def answer(*given: Any) -> Any:
        try:
            return _answer(run, given, checkpoint, top_k)
        except Exception as error:
            raise gradio.Error(str(error), print_exception=False) from error

    average = f", average {origin['average']}" if origin["average"] else ""
    figures = ", ".join(f"{name} {value:.4f}" for name, value in origin["results"].items())
    about = [
        f"{facts.model['_target_']}, {origin['checkpoint']}, step {origin['step']}{average}",
        figures or "no metrics at this step",
        f"data: {(run.config.data.train or {}).get('_target_', 'not named')}",
        f"classes: {', '.join(facts.classes or ()) or 'not named'}",
    ]
    shown = {"classes": "Label", "labels": "Label", "mask": "Image", "text": "Textbox"}
    kind = facts.outputs["kind"]
    return gradio.Interface(
        answer,
        _inputs(facts.inputs, kind, gradio),
        getattr(gradio, shown.get(kind, "JSON"))(label="answer"),
        title=origin["name"],
        article="\n\n".join(about),
        api_name="predict",
        flagging_mode="never",
    )


def _inputs(form: Any, answered: str, gradio: Any) -> list[Any]:
    """Return what a page asks for."""
    if answered == "text":
        tokens = gradio.Slider(1, 1000, 200, step=1, label="max_new_tokens")
        return [gradio.Textbox(label="prompt"), tokens]
    if form["kind"] == "picture":
        picture = gradio.Image(label="picture", type="filepath")
        # Handed on as it is: Pillow opens the formats that we list, no other.
        picture.preprocess = lambda payload: payload and payload.path
        return [picture]
    if form["kind"] != "table":
        return [gradio.JSON([0.0], label="the numbers of a sample, in lists")]
    return [
        gradio.Dropdown(list(column["categories"]), label=column["name"])
        if column["categories"]
        else gradio.Number(column["mean"], label=column["name"])
        for column in form["features"]
    ]


def _answer(run: Any, given: Sequence[Any], checkpoint: str, top_k: int) -> Any:
    """Return a run's answer for the values of a page, as gradio shows it."""
    import torch

    from data.formats.table import Columns, Table
    from scripts.prediction.work import mask_picture
    from trainer.assembly.data import build_pipeline

    form, answered = run.facts.inputs, run.facts.outputs["kind"]
    if answered == "text":
        text = run.generate(given[0], max_new_tokens=int(given[1]), checkpoint=checkpoint)[0]
        return given[0] + text
    sample = given[0]
    if form["kind"] == "table":
        names = [column["name"] for column in form["features"]]
        cells = {n: [None if v is None else str(v)] for n, v in zip(names, given, strict=True)}
        columns, transform = Columns(Path("the form"), cells, 1), build_pipeline(run.config, "eval")
        sample = Table(columns, form["features"], form["missing"], transform)[0]
    elif form["kind"] != "picture":
        sample = torch.tensor(sample, dtype=torch.float32)
    (row,) = run.predict([sample], top_k=top_k, checkpoint=checkpoint)
    if answered == "mask":
        return mask_picture(torch.tensor(row["prediction"])).convert("RGB")
    if answered == "labels":
        return dict(zip(row["prediction"], row["probability"], strict=True))
    if answered == "classes":
        told = list(row.values())  # a name, its probability, the next name, ...
        return dict(zip(told[::2], told[1::2], strict=True))
    return row
