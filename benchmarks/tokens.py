"""Learnt tokens a second of a language model on conversations, and the memory of its loss.

A Llama of 4 layers, a tokenizer and conversations are made here; nothing is downloaded. All weights
are trained by `experiment=chat`, with what it has on (metrics, bar, TensorBoard), but for
checkpoints. Packed rows hold whole conversations, padded ones one each. The loop by hand reads the
same packed rows from torch's DataLoader. Each turn is a run of its own. An update costs the median
of the CPU's time between updates: all of them have as many places, and a row has as many learnt
tokens as the data set's mean.

Memory is how far one update raises the peak of a process on the CPU, of a model with a large
vocabulary: its logits are most of it. `task.chunked_loss` computes them in parts. Each case has a
process of its own.
"""

import contextlib
import io
import json
import multiprocessing
import resource
import sys
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import tokenizers
import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from benchmarks import report
from benchmarks.ours import AfterUpdate
from benchmarks.report import BY_HAND, OURS, Cost, Report
from regimen.data.formats.chat import chat
from regimen.data.packing import PackedDocuments
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.experiment import build

CONVERSATIONS, CONTEXT, BATCH = 400, 256, 4  # of the data; tokens of a row; rows of an update
STEPS, LOG = 12, 4  # updates of a turn, and from one log to the next
LR = 2e-4
SIZES: dict[str, int] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VOCABULARY = 32_768  # of the model whose memory is measured
MEMORY_CASES: dict[str, tuple[str, ...]] = {
    "peak_mib": (),
    "peak_mib_chunked_loss": ("task.chunked_loss=true",),
}
START: Final = "spawn"  # the peak of a fork is that of this process
PACKED, PADDED = "packed", "padded"
_IGNORED = -100
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = ("tea", "milk", "rain", "snow", "bread", "salt", "boat", "river", "stone", "bird")


def tokens(rounds: int) -> Report:
    """Let every contender train for `rounds` turns, and compare; then measure the memory."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_conversations(folder / "train.jsonl")
        write_model(folder / "model")
        write_model(folder / "large", vocab_size=VOCABULARY)
        contenders = {
            f"{BY_HAND}, {PACKED}": partial(by_hand, folder),
            f"{OURS}, {PACKED}": partial(ours, folder, pack=True),
            f"{OURS}, {PADDED}": partial(ours, folder, pack=False),
        }
        wall, rates = report.split(report.in_turn(contenders, rounds))
        memory = _memory(folder)
    own = rates[f"{OURS}, {PACKED}"]
    return Report(
        f"Llama, rows of {CONTEXT} tokens, {BATCH} an update, one thread",
        "learnt tokens/s",
        rates,
        {
            "ratio_to_reference": report.ratios(rates)[f"{OURS}, {PACKED}"],
            "ratio_by_the_clock": report.ratios(wall)[f"{OURS}, {PACKED}"],
            "packed_to_padded": report.paired(own, rates[f"{OURS}, {PADDED}"]),
            **memory,
        },
        settings={"updates_of_a_turn": STEPS, "vocabulary_of_the_memory": VOCABULARY},
    )


def write_conversations(path: Path) -> None:
    """Write conversations of one to three answers as a jsonl file."""
    lines = []
    for number in range(CONVERSATIONS):
        messages = []
        for step in range(1 + number % 3):
            word = _WORDS[number * (2 * step + 1) % len(_WORDS)]
            said = " ".join(f"{word} number {number + more}" for more in range(1 + number % 7))
            messages.append({"role": "user", "content": f"what of {word}, {number}?"})
            messages.append({"role": "assistant", "content": f"{said}, and no more."})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_model(folder: Path, **sizes: int) -> None:
    """Write a Llama and a byte-level tokenizer of its own, as `save_pretrained` does."""
    special = ["<|im_start|>", "<|im_end|>"]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([f"user assistant what of {word}, number?" for word in _WORDS], trainer)
    make: Any = transformers.PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=bpe, eos_token=special[1], additional_special_tokens=special)
    tokenizer.chat_template = _TEMPLATE
    torch.manual_seed(0)
    values: Any = {"vocab_size": 512, "max_position_embeddings": CONTEXT, **SIZES, **sizes}
    config = transformers.LlamaConfig(**values)
    with contextlib.redirect_stderr(io.StringIO()):  # a bar
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def by_hand(folder: Path) -> Cost:
    """Train as a person writes it, over the same packed rows; return learnt tokens a second."""
    rows = chat(str(folder), "train", str(folder / "model"), CONTEXT, val_fraction=0.0)
    assert rows is not None
    dataset: Any = rows
    loader: DataLoader[Any] = DataLoader(dataset, BATCH, shuffle=True, drop_last=True)
    stamps = []
    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
        optimizer = AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        schedule = LambdaLR(optimizer, lambda step: 1 - step / STEPS)
        writer = SummaryWriter(str(folder / "by_hand"))
        losses = torch.zeros(())
        correct = torch.zeros(())
        model.train()
        with tqdm(total=STEPS) as bar:
            for step, batch in zip(range(1, STEPS + 1), loader, strict=False):
                targets = batch.pop("labels")[:, 1:].flatten()
                logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
                loss = cross_entropy(logits, targets)
                loss.backward()  # type: ignore[no-untyped-call]
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                is_learnt = targets != _IGNORED
                hits = (logits.detach().argmax(1) == targets) & is_learnt
                correct += hits.sum() / is_learnt.sum()
                losses += loss.detach()
                if step % LOG == 0:
                    writer.add_scalar("train/loss", losses.item() / LOG, step)
                    writer.add_scalar("train/token_accuracy", correct.item() / LOG, step)
                    losses.zero_()
                    correct.zero_()
                bar.update(1)
                stamps.append(report.now())
        writer.close()
    return _rate(rows, stamps)


def ours(folder: Path, pack: bool) -> Cost:
    """Train by `experiment=chat`; return learnt tokens a second."""
    stamps: list[Cost] = []
    note = AfterUpdate(lambda trainer: stamps.append(report.now()))
    words = _words(folder, "model", f"data.pack={str(pack).lower()}", f"trainer.max_steps={STEPS}")
    with contextlib.redirect_stderr(io.StringIO()):
        experiment = build(compose(words).config, callbacks={"note": note})
        experiment.trainer.use_run_dir(Path(tempfile.mkdtemp(dir=folder)))
        experiment.trainer.fit()
    rows: Any = experiment.data.sets["train"]
    return _rate(rows, stamps)


def _words(folder: Path, model: str, *more: str) -> list[str]:
    """Return the command line of a run, without the word `train`."""
    return [
        *("experiment=chat", "model=transformers", f"model.name={folder / model}"),
        *(f"data.root={folder}", f"data.context={CONTEXT}", "data.val_fraction=0"),
        *(f"loader.batch_size={BATCH}", f"trainer.log_every_n_steps={LOG}", f"optimizer.lr={LR}"),
        *("callbacks.checkpoint=null", "strategy.accelerator=cpu"),
        *more,
    ]


def _rate(rows: PackedDocuments, stamps: list[Cost]) -> Cost:
    """Return the learnt tokens a second, by the clock and by the CPU's time."""
    learnt = sum(int((rows[n]["labels"] != _IGNORED).sum()) for n in range(len(rows)))
    of_update = BATCH * learnt / len(rows)
    wall, cpu = report.typical(stamps)
    return Cost(of_update / wall, of_update / cpu)


def _memory(folder: Path) -> dict[str, float]:
    """Return the peak of each case in MiB."""
    context = multiprocessing.get_context(START)
    found = {}
    for name, words in MEMORY_CASES.items():
        here, there = context.Pipe()
        given = _words(folder, "large", "trainer.max_steps=1", *words)
        process = context.Process(target=_send_peak, args=(given, there), daemon=True)
        process.start()
        there.close()  # so that `recv` raises EOFError when the process fails
        found[name] = here.recv()
        process.join()
    return found


def _send_peak(words: list[str], asked: Connection) -> None:
    """Train in a process of its own; send by how many MiB its peak has grown."""
    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()):
        trainer = build(compose(words).config).trainer
        before = _peak()
        trainer.fit()
    asked.send(_peak() - before)


def _peak() -> float:
    """Return the largest memory of this process so far, in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10  # of bytes, or of KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
