"""`regimen demo run=RUN_DIR`: a page on this machine that shows what a trained model answers."""

import logging
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from regimen.conf.errors import ConfigError
from regimen.scripts.cli.console import exit_code, importing
from regimen.scripts.cli.keys import Demo, read_keys
from regimen.scripts.cli.signals import StoppedEarlyError
from regimen.trainer.files.layout import encodable

_LOCAL = ("127.0.0.1", "localhost", "::1")


def demo(argv: Sequence[str]) -> int:
    """Do what a command line asks for; torch is imported once its keys are sound."""
    keys, arguments = read_keys(Demo, argv)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio's own, read when it is imported
    with importing():
        from regimen.trainer.inference.run import load_run

    for name in ("httpx", "httpx2"):  # a line for each request of gradio to itself
        logging.getLogger(name).setLevel(logging.WARNING)
    page = page_of(
        load_run(keys.run, keys.device, arguments.allow_targets), keys.checkpoint, keys.top_k
    )
    try:
        serve(page, keys.host, keys.port)
        threading.Event().wait()
    except (StoppedEarlyError, KeyboardInterrupt) as error:
        return exit_code(error)
    finally:
        page.close(verbose=False)
    return 0


def serve(page: Any, host: str, port: int) -> None:
    """Serve a page and print its address. Raises ConfigError where the port is in use."""
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    login = None if host in _LOCAL else ("demo", secrets.token_urlsafe(16))
    # A foreign page's requests to 127.0.0.1 carry its name in Host (DNS rebinding).
    only = Middleware(TrustedHostMiddleware, allowed_hosts=["*"] if login else [*_LOCAL, host])
    options: dict[str, Any] = {"share": False, "ssr_mode": False, "prevent_thread_lock": True}
    options |= {"max_file_size": "20mb", "app_kwargs": {"middleware": [only]}, "quiet": True}
    try:
        _, address, _ = page.launch(
            server_name=host, server_port=port or None, auth=login, **options
        )
    except OSError as error:
        raise ConfigError("port", str(error), "port=0 takes one that is free") from error
    print(address + (f" (name {login[0]}, password {login[1]})" if login else ""))
    print("Ctrl-C ends it", flush=True)


def page_of(run: Any, checkpoint: str, top_k: int) -> Any:
    """Return gradio's page for a run: what it is asked, its answer, and what it is."""
    import gradio

    from regimen.trainer.export.formats import provenance

    # The page is JSON, which gradio writes in strict UTF-8.
    names = run.facts.classes and [encodable(name) for name in run.facts.classes]
    run.facts = run.facts._replace(classes=names)
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
    kind, form = facts.outputs["kind"], facts.inputs
    if kind == "text":
        tokens = gradio.Slider(1, 1000, 200, step=1, label="max_new_tokens")
        asked = [gradio.Textbox(label="prompt"), tokens]
    elif form["kind"] == "picture":
        asked = [gradio.Image(label="picture", type="filepath")]
        # Handed on as it is: Pillow opens the formats that we list, no other.
        asked[0].preprocess = lambda payload: payload and payload.path
    elif form["kind"] == "table":
        asked = [
            gradio.Dropdown(list(column["categories"]), label=column["name"])
            if column["categories"]
            else gradio.Number(column["mean"], label=column["name"])
            for column in form["features"]
        ]
    else:
        asked = [gradio.JSON([0.0], label="the numbers of a sample, in lists")]
    shown = {"classes": "Label", "labels": "Label", "mask": "Image", "text": "Textbox"}
    return gradio.Interface(
        answer,
        asked,
        getattr(gradio, shown.get(kind, "JSON"))(label="answer"),
        title=origin["name"],
        article="\n\n".join(about),
        api_name="predict",
        flagging_mode="never",
    )


def _answer(run: Any, given: Sequence[Any], checkpoint: str, top_k: int) -> Any:
    """Return a run's answer for the values of a page, as gradio shows it."""
    import torch

    from regimen.scripts.runs.answers import mask_picture

    form, answered, sample = run.facts.inputs, run.facts.outputs["kind"], given[0]
    if answered == "text":
        options = {"max_new_tokens": int(given[1]), "checkpoint": checkpoint}
        return sample + run.generate(sample, **options)[0]
    if form["kind"] == "table":
        names = [column["name"] for column in form["features"]]
        sample = dict(zip(names, given, strict=True))
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
