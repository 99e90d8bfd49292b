"""What a command prints beside its answer, how it ends, its keys, and who answers to its name."""

import io
import logging
import subprocess
import sys
import sysconfig
import warnings
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
import torch

from regimen.conf.errors import ConfigError
from regimen.conf.fields import declared
from regimen.conf.layout import ROOT
from regimen.data.errors import UnreadableError
from regimen.scripts.cli.arguments import AnsweredError
from regimen.scripts.cli.console import (
    AS_JOB,
    describe,
    exit_code,
    ignore_broken_pipes,
    log_to_stderr,
    logger,
    print_banner,
    report,
    route_warnings,
)
from regimen.scripts.cli.keys import Demo, Evaluation, Export, Prediction, Quantization, read_keys
from regimen.trainer.errors import StorageError, is_shape_error
from regimen.trainer.files.layout import format_table

EVIL = "a\nerror: b\x1b[2J\x9b31m\r\u202ec.png"
TORCH = f"{sysconfig.get_path('purelib')}/torch/utils/data/dataloader.py"
OURS = str(ROOT / "trainer" / "trainer.py")
MINE = "/home/me/project/mine.py"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("RANK", *AS_JOB):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def console(*more):
    """Set up what a command sets up, for a while."""
    root = logging.getLogger()
    kept = root.handlers, root.level
    log_to_stderr(True)
    root.handlers += more
    try:
        with warnings.catch_warnings():
            route_warnings()
            yield
    finally:
        root.handlers = kept[0]
        root.setLevel(kept[1])


def test_memory_that_gives_out_names_the_keys_to_turn():
    device = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee docs")
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**60, dtype=torch.uint8)
    for error in (device, host.value, MemoryError()):
        text = describe(error)
        assert (exit_code(error), text.count("\n")) == (8, 0)
        assert "trainer.gradient_accumulation_steps" in text


@pytest.mark.parametrize(
    "text",
    [
        "XPU out of memory. Tried to allocate 2.00 GiB",
        "NPU out of memory. NPUWorkspaceAllocator tried to allocate 1 MiB",
        "MPS backend out of memory (MPS allocated: 1.00 GB, max allowed: 9.07 GB)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
        "Insufficient memory on the device",
        "synStatus=20 [Not enough memory] Device allocation",
        "Failed to allocate a buffer of 3 GiB",
    ],
)
def test_memory_of_a_device_gives_out_in_any_vendors_words(text):
    error = RuntimeError(text)
    assert exit_code(error) == 8
    assert "trainer.gradient_accumulation_steps" in describe(error)


# What devices and their libraries say that fail by themselves.
OF_A_DEVICE = [
    "Could not run 'aten::_fused_adamw_' with arguments from the 'NPU' backend. 'aten::x' is only "
    "available for these backends: [CPU, Meta]",
    "The operator 'aten::linalg_qr.out' is not currently implemented for the MPS device. Set the "
    "environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a fallback",
    "Could not run 'torchvision::nms' with arguments from the 'PrivateUse1' backend.",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "MIOpen Error: /MIOpen/src/sqlite_db.cpp:220: Internal error while accessing SQLite database",
    "miopenStatusUnknownError",
    "rocBLAS failure: not initialized",
    "FIND was unable to find an engine to execute this computation",
    "Graph compile failed. synStatus=synStatus 26 [Generic failure].",
    "NPU function error: aclnnConvolution, error code is 561103",
    "oneDNN error: could not create a primitive",
    "Required aspect fp64 is not supported on the device",
    "Native API failed. Native API returns: -997 (PI_ERROR_UNKNOWN)",
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.",
]
# What tensors that do not fit each other give.
OF_SHAPES = [
    "mat1 and mat2 shapes cannot be multiplied (4x8 and 5x3)",
    "Given groups=1, weight of size [4, 3, 3, 3], expected input[8, 1, 8, 8] to have 3 channels, "
    "but got 1 channels instead",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
    "cpu!",
    "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
    "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the "
    "same",
    "The size of tensor a (4) must match the size of tensor b (5) at non-singleton dimension 1",
    "Could not run 'aten::addmm' with arguments from the 'QuantizedCPU' backend.",
    "shape '[8, -1]' is invalid for input of size 9",
]


@pytest.mark.parametrize(
    ("text", "refused"),
    [*((text, True) for text in OF_A_DEVICE), *((text, False) for text in OF_SHAPES)],
)
def test_what_a_device_cannot_compute_is_no_misfit_of_model_and_data(text, refused):
    names = {"__name__": "torch.nn.modules.linear", "error": RuntimeError(text)}
    with pytest.raises(RuntimeError) as raised:
        exec("raise error", names)
    error = raised.value
    error.__traceback__ = error.__traceback__.tb_next  # of torch's code alone
    assert is_shape_error(error) is not refused
    assert exit_code(error) == 1
    assert ("strategy.accelerator=cpu" in describe(error)) is refused
    assert text.partition("\n")[0][:40] in describe(error)


@pytest.mark.parametrize(
    ("module", "is_misfit"),
    [
        pytest.param("torchvision.models.vision_transformer", True, id="an image of another size"),
        pytest.param("regimen.trainer.update.updater", False, id="a mistake of ours"),
        pytest.param("mine", False, id="the user's"),
    ],
)
def test_a_librarys_assertion_is_a_misfit_of_model_and_data(module, is_misfit):
    error = AssertionError("Wrong image height! Expected 224 but got 16!")
    with pytest.raises(AssertionError):
        exec("raise error", {"__name__": module, "error": error})
    error.__traceback__ = error.__traceback__.tb_next  # of that module alone
    assert is_shape_error(error) is is_misfit


def test_an_error_is_one_line_and_a_traceback_shows_codes(capsys):
    assert describe(ValueError("first\nsecond")) == "ValueError: first"
    assert format_table([["name"], [EVIL]], 200)[1].startswith(r"a\nerror: b\x1b[2J")
    for error in (UnreadableError(f"cannot decode {EVIL}"), StorageError(f"{Path(EVIL)}: full")):
        report(error)
        printed = capsys.readouterr().err
        assert printed.startswith("error: ")
        assert printed.count("\n") == 1
        assert printed[:-1].isprintable()
        assert r"a\nerror: b\x1b[2J" in printed
    assert report(KeyError(EVIL)) == 1
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_any_text_can_be_printed(monkeypatch, encoding):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    ignore_broken_pipes()
    print("a \ud800 \udcff ✓")
    sys.stdout.flush()
    assert written.getvalue().startswith(b"a \\ud800 \\udcff ")


def test_what_the_terminal_shows_of_the_log(capsys, monkeypatch):
    """Paths on one line; of a job of a sweep warnings only."""
    with console():
        logger.info("read %s, then %s", Path(EVIL), "x\x1b[0m")
        logger.info("two\n  lines")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == r"read a\nerror: b\x1b[2J\x9b31m\r\u202ec.png, then x\x1b[0m"
    assert rest == ["two", "  lines"]
    monkeypatch.setenv(*next(iter(AS_JOB.items())))
    with console():
        logger.info("run directory: here")
        logger.warning("warning: something")
    assert capsys.readouterr().err == "warning: something\n"


@pytest.mark.parametrize(
    ("override", "own"),
    [
        pytest.param("loader.batch_size=4", False, id="of-the-configuration"),
        pytest.param("transforms=none", False, id="a-group"),
        pytest.param("models=mlp", False, id="nearer-to-another"),
        pytest.param("+extra=1", False, id="far"),
        pytest.param("checkpoint=last", True, id="its-own"),
    ],
)
def test_a_key_is_a_command_s_or_the_configuration_s(override, own, tmp_path):
    (tmp_path / "config.yaml").write_text("")
    asked = read_keys(Evaluation, [f"run={tmp_path}", override])
    assert asked[0].checkpoint == ("last" if own else "best")
    assert asked[1].overrides == (() if own else (override,))
    assert asked[1].config_dirs == (str(tmp_path),)
    with pytest.raises(ConfigError, match=r"chekpoint: unknown key; did you mean checkpoint\?"):
        read_keys(Evaluation, [f"run={tmp_path}", override, "chekpoint=last"])


def test_all_mistakes_of_a_command_without_other_keys_are_told_at_once(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    good = [f"run={tmp_path}", "samples=0", "samples=7", "max_drop=1e-3", "overwrite=true"]
    keys, _ = read_keys(Quantization, [*good, "split=null", "out=2024"])
    assert (keys.run, keys.samples, keys.max_drop) == (str(tmp_path), 7, 0.001)
    assert (keys.overwrite, keys.split, keys.out, keys.method) == (True, None, "2024", "auto")
    bad = ["run=nowhere", "method=c", "samples=1.5", "overwrite=1", "metod=a", "max_drop=-1"]
    with pytest.raises(ConfigError) as caught:
        read_keys(Quantization, bad)
    assert str(caught.value).splitlines()[1:] == [
        "  metod: unknown key; did you mean method?",
        "  run: expected the directory of a run, which holds a config.yaml, got 'nowhere' (text)",
        "  overwrite: expected true or false, got 1",
        "  method: expected one of auto, static, dynamic, got 'c' (text)",
        "  samples: expected an integer (>= 1), got 1.5",
        "  max_drop: expected a number >= 0, got -1",
    ]
    with pytest.raises(ConfigError, match="format: missing a value"):
        read_keys(Export, good[:1])


@pytest.mark.parametrize("command", [Evaluation, Prediction, Export, Quantization, Demo])
def test_help_names_every_key(command, capsys):
    with pytest.raises(AnsweredError) as caught:
        read_keys(command, ["--help"])
    assert report(caught.value) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert {*declared(command)} <= {w.partition("=")[0] for w in out.split() if "=" in w}


def test_the_first_line_names_versions_once_a_run(capsys, monkeypatch):
    print_banner()
    told = capsys.readouterr()
    version = torch.__version__.partition("+")[0]
    assert (told.out, told.err.endswith(f", torch {version}\n")) == ("", True)
    for name, value in (("RANK", "1"), *AS_JOB.items()):
        with monkeypatch.context() as other:
            other.setenv(name, value)
            print_banner()
    assert capsys.readouterr().err == ""


def test_a_warning_of_one_s_own_code_is_a_line_and_of_a_library_for_the_log(capsys):
    kept = MemoryHandler(9)
    with console(kept):
        for file in (logging.__file__, "<frozen importlib._bootstrap>", OURS):
            warnings.showwarning(UserWarning("theirs"), UserWarning, file, 1)
        warnings.showwarning(UserWarning("too many\n  workers"), UserWarning, TORCH, 3)
        assert capsys.readouterr() == ("", "")
        warnings.showwarning(DeprecationWarning("use x"), DeprecationWarning, MINE, 7)
    line = f"warning: DeprecationWarning: use x ({MINE}:7)"
    assert capsys.readouterr().err == f"{line}\n"
    said = [record.getMessage() for record in kept.buffer]
    assert said[3:] == [f"warning: UserWarning: too many workers ({TORCH}:3)", line]


# What a run does with its streams, without one: many lines to both, a bar's pieces, an exit code.
COMMAND = """
import logging, sys
from regimen.scripts.cli.console import run_and_exit, log_to_stderr

def command(argv):
    log_to_stderr(True)
    for i in range(5000):
        print("a line to be read", i)
        logging.getLogger("regimen").info("a line of the log %s", i)
        sys.stderr.write("\\r50%")
        sys.stderr.flush()
    print("the end", flush=True)
    open(sys.argv[1], "w").write("done")
    return 5

run_and_exit(command, [])
"""


@pytest.mark.parametrize(
    ("redirection", "ends"),
    [
        pytest.param("2>&1 | head -1", None, id="both-to-head"),
        pytest.param("> /dev/full 2>&1", None, id="both-full"),
        pytest.param("2> /dev/null >&-", None, id="closed"),
        pytest.param("<&- >&- 2>&-", None, id="all-closed"),
        pytest.param("2> /dev/null | cat", ["a line to be read 0", "the end"], id="read"),
    ],
)
def test_nobody_need_read_to_the_end(tmp_path, redirection, ends):
    done = tmp_path / "done"
    words = [sys.executable, "-c", COMMAND, str(done)]
    shell = f'"$0" "$@" {redirection}; exit ${{PIPESTATUS[0]}}'
    result = subprocess.run(
        ["bash", "-c", shell, *words], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    read = (result.stdout + result.stderr).splitlines()
    assert (result.returncode, done.exists()) == (5, True), read
    assert "Error" not in "".join(read)
    assert read[:: len(read) - 1] == ends if ends else len(read) <= 1
