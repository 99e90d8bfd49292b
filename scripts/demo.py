"""`regimen demo run=RUN_DIR`: a page on this machine that shows what a trained model answers."""

import logging
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from regimen.conf.errors import ConfigError
from regimen.scripts.cli.console import exit_code
from regimen.scripts.cli.keys import Demo, loaded_run, read_keys
from regimen.scripts.cli.signals import StoppedEarlyError
from regimen.trainer.files.layout import encodable

_LOCAL = ("127.0.0.1", "localhost", "::1")


def demo(argv: Sequence[str]) -> int:
    """Run `regimen demo`, return its exit code; torch is imported once the keys are checked."""
    keys, arguments = read_keys(Demo, argv)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio's own, read when it is imported
    # They log a line for each request that gradio sends to itself.
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    run = loaded_run(keys, keys.device, arguments)
    page = page_of(run, keys.checkpoint, keys.top_k)
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
    # A page of another site can send requests to 127.0.0.1 under its own name (DNS rebinding): the
    # name in Host tells. With a password any name is allowed.
    hosts = ["*"] if login else [*_LOCAL, host]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
    try:
        _, address, _ = page.launch(
            server_name=host,
            server_port=port or None,
            auth=login,
            share=False,
            ssr_mode=False,
            prevent_thread_lock=True,
            max_file_size="20mb",
            app_kwargs={"middleware": middleware},
            quiet=True,
        )
    except OSError as error:
        raise ConfigError("port", str(error), "port=0 takes one that is free") from error
    if login:
        print(f"{address} (name {login[0]}, password {login[1]})")
    else:
        print(address)
    print("Ctrl-C ends it", flush=True)


def page_of(run: Any, checkpoint: str, top_k: int) -> Any:
    """Build the Gradio page of a run: an input form, the prediction and the model card."""
    import gradio

    from regimen.trainer.export.formats import provenance

    # The page is JSON, which gradio writes in strict UTF-8.
    names = run.facts.classes and [encodable(name) for name in run.facts.classes]
    run.facts = run.facts._replace(classes=names)
    origin = provenance(run, checkpoint)

    def answer(*inputs: Any) -> Any:
        try:
            return _answer(run, inputs, checkpoint, top_k)
        except Exception as error:
            raise gradio.Error(str(error), print_exception=False) from error

    kind = run.facts.outputs["kind"]
    components = {"classes": "Label", "labels": "Label", "mask": "Image", "text": "Textbox"}
    output = getattr(gradio, components.get(kind, "JSON"))
    return gradio.Interface(
        answer,
        _input_form(run.facts),
        output(label="answer"),
        title=origin["name"],
        article="\n\n".join(_model_card(run, origin)),
        api_name="predict",
        flagging_mode="never",
    )


def _model_card(run: Any, origin: Mapping[str, Any]) -> list[str]:
    """Return the paragraphs below the form: model, checkpoint, metrics, data and classes."""
    average = f", average {origin['average']}" if origin["average"] else ""
    model = run.facts.model["_target_"]
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in origin["results"].items())
    data = (run.config.data.train or {}).get("_target_", "not named")
    return [
        f"{model}, {origin['checkpoint']}, step {origin['step']}{average}",
        metrics or "no metrics at this step",
        f"data: {data}",
        f"classes: {', '.join(run.facts.classes or ()) or 'not named'}",
    ]


def _input_form(facts: Any) -> list[Any]:
    """Return the input components for a sample."""
    import gradio

    form = facts.inputs
    if facts.outputs["kind"] == "text":
        tokens = gradio.Slider(1, 1000, 200, step=1, label="max_new_tokens")
        return [gradio.Textbox(label="prompt"), tokens]
    if form["kind"] == "picture":
        picture = gradio.Image(label="picture", type="filepath")
        # The file is passed on unchanged: Pillow opens the formats that we list, no other.
        picture.preprocess = lambda payload: payload and payload.path
        return [picture]
    if form["kind"] == "texts":
        return [gradio.Textbox(label=name) for name in form["columns"]]
    if form["kind"] == "words":
        return [gradio.Textbox(label="words between blanks")]
    if form["kind"] != "table":
        return [gradio.JSON([0.0], label="the numbers of a sample, in lists")]
    columns = []
    for column in form["features"]:
        name = column["name"]
        if column["categories"]:
            columns.append(gradio.Dropdown(list(column["categories"]), label=name))
        else:
            columns.append(gradio.Number(column["mean"], label=name))
    return columns


def _answer(run: Any, inputs: Sequence[Any], checkpoint: str, top_k: int) -> Any:
    """Return the prediction for the inputs of a page, in the form that gradio shows."""
    import torch

    from regimen.scripts.runs.answers import mask_picture

    sample = inputs[0]
    kind = run.facts.outputs["kind"]
    if kind == "text":
        texts = run.generate(sample, max_new_tokens=int(inputs[1]), checkpoint=checkpoint)
        return sample + texts[0]
    form = run.facts.inputs
    if form["kind"] == "table":
        names = [column["name"] for column in form["features"]]
        sample = dict(zip(names, inputs, strict=True))
    elif form["kind"] == "texts":
        sample = dict(zip(form["columns"], inputs, strict=True))
    elif form["kind"] not in ("picture", "words"):
        sample = torch.tensor(sample, dtype=torch.float32)
    (row,) = run.predict([sample], top_k=top_k, checkpoint=checkpoint)
    if kind == "mask":
        return mask_picture(torch.tensor(row["prediction"])).convert("RGB")
    if kind == "labels":
        return dict(zip(row["prediction"], row["probability"], strict=True))
    if kind == "classes":
        # Behind the texts, if there are any: a name, its probability, the next name, ...
        cells = list(row.values())[list(row).index("prediction") :]
        return dict(zip(cells[::2], cells[1::2], strict=True))
    return row
