"""A tokenizer and a Llama for tests, made here in seconds, and conversations to train them on."""

import json
from pathlib import Path
from typing import Any

# In <|im_start|>ROLE\n ... <|im_end|>\n, with what transformers needs to find the answers itself.
CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = ["tea", "milk", "rain", "snow", "bread", "salt", "boat", "river", "stone", "bird"]


def conversation(*answers: str, system: str | None = None) -> dict[str, Any]:
    """Return a row with these answers, each to a question about itself."""
    messages = [{"role": "system", "content": system}] if system else []
    for answer in answers:
        messages.append({"role": "user", "content": f"what of {answer.strip()[:20]}?"})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def conversations(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Return conversations of one to three answers, all of them different."""
    rows = []
    for number in range(first, first + count):
        words = [_WORDS[(number * step) % len(_WORDS)] for step in (1, 3, 7)]
        answers = [f"{word} number {number}, and {words[0]}." for word in words]
        rows.append(conversation(*answers[: 1 + number % 3]))
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as a jsonl file."""
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def make_tokenizer(template: str | None = CHATML, trims: bool = False) -> Any:
    """Train a byte-level BPE of 512 words; `trims`: its offsets leave blanks out."""
    import tokenizers
    import transformers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trims)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [json.dumps(row) for row in conversations(60)]
    bpe.train_from_iterator([*texts, "user\n what\n\n of assistant\n"] * 2, trainer)
    make: Any = transformers.PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=bpe, eos_token="<|im_end|>", additional_special_tokens=special
    )
    tokenizer.chat_template = template
    return tokenizer


def llama_config(**options: Any) -> Any:
    """Return the configuration of a Llama of about 107,000 parameters."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return transformers.LlamaConfig(**{**sizes, **options})


def write_model(folder: Path, **options: Any) -> Path:
    """Write a Llama and its tokenizer as `save_pretrained` does."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(llama_config(**options)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
