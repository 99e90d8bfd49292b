"""Decode boxes of JPEG files by nvImageCodec (extra `jpeg`), on the CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Box = tuple[int, int, int, int]  # top, left, height, width
_NO_GPU = -99999  # the library's number for the CPU


def region_decoder() -> bool:
    """Return whether the package is installed. Workers that are forked later share its import."""
    return _package() is not None


def box_of_jpeg(data: bytes, channels: int, box: Box) -> npt.NDArray[np.uint8] | None:
    """Return a box of the picture of a JPEG file, (height, width, channels); None if it is broken.

    libjpeg-turbo decodes its rows and columns with their neighbours, so that the pixels are those
    of the whole picture; of the rows above it reads only the compressed bytes. The box is that of
    the file, before the picture is turned upright by its EXIF orientation.
    """
    codec = _package()
    top, left, tall, wide = box
    edges = codec.Region(start=(top, left), end=(top + tall, left + wide))
    try:
        part = codec.CodeStream(data).get_sub_code_stream(region=edges)
        image = _decoder(os.getpid()).decode(part, params=_form(channels))
    except RuntimeError:
        return None
    return None if image is None else np.asarray(image)


@cache
def _package() -> Any:
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # broken files are reported by us
    try:
        with _quiet():
            from nvidia import nvimgcodec
    except ImportError:
        return None
    return nvimgcodec


@contextmanager
def _quiet() -> Iterator[None]:
    """Close stderr: at import the library lists its parts for GPUs that are not installed."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@cache
def _decoder(process: int) -> Any:
    """Return the decoder of a process: a forked one has no threads of its parent's."""
    codec = _package()
    on_cpu = [codec.Backend(codec.BackendKind.CPU_ONLY)]
    return codec.Decoder(device_id=_NO_GPU, max_num_cpu_threads=1, backends=on_cpu)


@cache
def _form(channels: int) -> Any:
    codec = _package()
    colours = codec.ColorSpec.GRAY if channels == 1 else codec.ColorSpec.SRGB
    return codec.DecodeParams(color_spec=colours, apply_exif_orientation=False)
