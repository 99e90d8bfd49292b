"""A BERT of a few words with its tokenizer, and texts to train it on, made here in a moment."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PEOPLE = ["anna", "boris", "carla", "dinesh"]
_PLACES = ["oslo", "lima", "new york", "cairo"]
_OTHERS = ["went", "to", "saw", "in", "the", "rain", "and", "stayed", "good", "bad", "film", "a"]
# `##` begins the second piece of a word: "annas" are two tokens.
_PIECES = ["##s", "##ing", "##ed"]
TAGS = ["B-LOC", "B-PER", "I-LOC", "O"]


def make_tokenizer(**options: Any) -> Any:
    """Return a WordPiece tokenizer of a few words, as BERT's."""
    import tokenizers
    import transformers

    words = [*_PEOPLE, *" ".join(_PLACES).split(), *_OTHERS, *_PIECES]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    model = tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {
        "unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]",
        "sep_token": "[SEP]", "mask_token": "[MASK]", "model_max_length": 64,
    }  # fmt: skip
    make: Any = transformers.PreTrainedTokenizerFast
    return make(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{**names, **options},
    )


def bert_config(**options: Any) -> Any:
    """Return the configuration of a BERT of about 10,000 parameters, without dropout."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return transformers.BertConfig(**{**sizes, **options})


def write_bert(folder: Path, **options: Any) -> Path:
    """Write a BERT without a head, and its tokenizer, as `save_pretrained` does."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.BertModel(bert_config(**options)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def pairs(count: int, first: int = 0) -> list[dict[str, str]]:
    """Return rows of two texts of different lengths, which name the same place or not."""
    rows = []
    for number in range(first, first + count):
        person = _PEOPLE[number % 4]
        place = _PLACES[(number * 3 + number // 4) % 4]
        other = _PLACES[(number * 3 + number // 4 + number % 2) % 4]
        rain = " in the rain" * (number % 5)
        rows.append(
            {
                "premise": f"{person} went to {place}{rain}",
                "hypothesis": f"{person} saw {other}" + " and stayed" * (number % 3),
                "label": "same" if other == place else "other",
            }
        )
    return rows


def sentences(count: int, first: int = 0) -> list[dict[str, list[str]]]:
    """Return sentences of different lengths whose words have tags of people and places."""
    rows = []
    for number in range(first, first + count):
        words = [_PEOPLE[number % 4] + "s" * (number % 2), "went", "to"]
        tags = ["B-PER", "O", "O"]
        place = _PLACES[(number * 3 + number // 4) % 4].split()
        words += place
        tags += ["B-LOC", "I-LOC"][: len(place)]
        for word in ["in", "the", "rain"] * (number % 4):
            words.append(word)
            tags.append("O")
        rows.append({"words": words, "tags": tags})
    return rows


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as a csv file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as a jsonl file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
