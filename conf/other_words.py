"""The names that keys of other frameworks, and keys without their section, have here."""

from regimen.conf.fields import declared
from regimen.conf.schema import Config

# The last part of a foreign key, and our key for it. `A B: C` translates both A and B.
_KEYS = """
learning_rate: optimizer.lr
momentum: optimizer.momentum
optim opt: optimizer
scheduler sched lr_scheduler_type: lr_scheduler
warmup_steps warmup_epochs: lr_scheduler/warmup=linear and lr_scheduler.warmup
train_batch_size: loader.batch_size
per_device_train_batch_size: loader.batch_size (of an update, on all devices)
per_device_eval_batch_size val_batch_size: loader.eval_batch_size
workers dataloader_num_workers: loader.num_workers
device: strategy.accelerator (auto, cpu, cuda, ...) and strategy.devices
gpus: strategy.devices
num_nodes: torchrun (docs/distributed.md)
epochs num_epochs num_train_epochs: trainer.max_epochs
max_iters: trainer.max_steps
min_epochs min_steps: callbacks.early_stopping.patience (nothing else ends a run before its maximum)
max_steps_per_epoch num_batches_per_epoch: trainer.limit_train_batches
max_duration: trainer.max_time, max_epochs or max_steps
accumulate_grad_batches accumulation_steps grad_accum_steps: trainer.gradient_accumulation_steps \
(micro-batches that loader.batch_size, the samples of a whole update, is split into)
gradient_clip_val max_grad_norm grad_clip clip_grad: trainer.clip_grad_norm
gradient_clip_algorithm: trainer.clip_grad_norm or trainer.clip_grad_value
mixed_precision amp fp16 bf16: trainer.precision=bf16 or fp16
torch_compile: trainer.compile
benchmark: trainer.cudnn_benchmark
logging_steps: trainer.log_every_n_steps
check_val_every_n_epoch val_check_interval eval_steps: trainer.validate_every_n_epochs or \
trainer.validate_every_n_steps
num_sanity_val_steps: trainer.validate_at_start
fast_dev_run: debug=fast
gradient_checkpointing: trainer.activation_checkpointing
enable_progress_bar: callbacks.progress.bar
enable_checkpointing: callbacks.checkpoint
logger: callbacks
save_steps: callbacks.checkpoint.every_n_steps
save_top_k: callbacks.checkpoint.save_top_k
early_stopping: callbacks.early_stopping
patience: callbacks.early_stopping.patience
monitor: callbacks.checkpoint.monitor and callbacks.early_stopping.monitor
ckpt_path resume_from_checkpoint: resume=auto, or resume=PATH
output_dir save_dir log_dir default_root_dir: run_dir
experiment_name exp_name run_name task_name: name
optimized_metric: callbacks.checkpoint.monitor (by which a sweep compares its jobs)
config config_file: `--config-dir DIR experiment=NAME`
loss criterion: task.loss
metrics: task.metrics
image_size img_size: data.image_size
data_dir: data.root
dataset: data
arch: model
"""
# Values of `precision` in other frameworks, and ours.
_VALUES = """
16 16-mixed 16-true float16 half: fp16
bf16-mixed bfloat16 amp: bf16
bf16-true: bf16_true
32 32-true float32: fp32
64 64-true: fp64
"""


# Resolvers that other projects register, and the answer to each.
RESOLVERS = {
    "eval": "a configuration computes nothing: write the value, or compute it in Python",
    "hydra": "run_dir=DIR says where a run is written; relative paths begin where it is started",
}


def _read(table: str) -> dict[str, str]:
    translations = {}
    for line in table.strip().splitlines():
        words, _, ours = line.partition(": ")
        for word in words.split():
            translations[word] = ours
    return translations


OUR_KEYS = _read(_KEYS)
VALUES = _read(_VALUES)


def our_key(key: str) -> str | None:
    """Return our name for a key of another framework, or for a key without its section.

    None if there is no other name for it.
    """
    name = key.rpartition(".")[2]
    ours = OUR_KEYS.get(name) or _with_section(name)
    return None if ours == key else ours


def _with_section(name: str) -> str | None:
    """Return the first key of this name, at the root or in one of its sections."""
    if name in declared(Config):
        return name
    for section, key in declared(Config).items():
        # Nobody who forgets a section means a sweep's key.
        if section != "sweep" and key.inner_schema and name in declared(key.inner_schema):
            return f"{section}.{name}"
    return None
