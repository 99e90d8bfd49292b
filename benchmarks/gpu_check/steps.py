"""The steps in their order: where each is written, how long it takes, what it shows."""

from typing import NamedTuple


class Step(NamedTuple):
    """A step is started where its expected seconds are left, and ended after twice as many."""

    module: str
    seconds: int  # expected, of one fast card
    shows: str


STEPS = {
    "smoke": Step("runs", 55, "train, evaluate, predict, load_run; fp32, tf32, bf16, fp16"),
    "tests": Step("runs", 120, "the tests for any accelerator, of turns and of what is not finite"),
    "numbers": Step("runs", 45, "the CPU's numbers, run for run; an exact resume after SIGKILL"),
    "graphs": Step("graphs", 50, "CUDA graphs give the losses of the same without them"),
    "waits": Step("graphs", 35, "the host waits for nothing between two log lines"),
    "speed": Step("speed", 150, "ResNet-50, ResNet-18 and a GPT against loops by hand; kernels"),
    "data": Step("speed", 80, "the device does not wait for JPEG files, nor for data kept on it"),
    "saves": Step("saves", 42, "how long a save keeps an update waiting, and the memory pinned"),
    "memory": Step("saves", 42, "gradient_accumulation_steps=auto, then EMA and a plain optimizer"),
    "airbench": Step("speed", 120, "examples/airbench, where DATA_ROOT holds cifar10"),
}
