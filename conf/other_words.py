"""The words of other frameworks, and of keys without their section: what they are called here."""

from types import MappingProxyType

_CLIP = "trainer.clip_grad_norm"
_ACCUMULATION = "trainer.gradient_accumulation_steps (micro-batches that loader.batch_size, the "
_ACCUMULATION += "samples of a whole update, is split into)"
_EPOCHS, _STEPS, _RUN_DIR = "trainer.max_epochs", "trainer.max_steps", "run_dir"
_DEVICE = "strategy.accelerator (auto, cpu, cuda, mps) and strategy.devices"
_VALIDATION = "trainer.validate_every_n_epochs or trainer.validate_every_n_steps"
_WARMUP = "lr_scheduler/warmup=linear and lr_scheduler.warmup"
_RESUME = "resume=auto, or resume=PATH"

# By the last part of a key that is unknown where it stands.
KEYS = MappingProxyType(
    {
        "lr": "optimizer.lr",
        "learning_rate": "optimizer.lr",
        "weight_decay": "optimizer.weight_decay",
        "momentum": "optimizer.momentum",
        "optim": "optimizer",
        "opt": "optimizer",
        "scheduler": "lr_scheduler",
        "sched": "lr_scheduler",
        "lr_scheduler_type": "lr_scheduler",
        "warmup_steps": _WARMUP,
        "warmup_epochs": _WARMUP,
        "batch_size": "loader.batch_size",
        "train_batch_size": "loader.batch_size",
        "per_device_train_batch_size": "loader.batch_size (of an update, on all devices)",
        "per_device_eval_batch_size": "loader.eval_batch_size",
        "val_batch_size": "loader.eval_batch_size",
        "num_workers": "loader.num_workers",
        "workers": "loader.num_workers",
        "dataloader_num_workers": "loader.num_workers",
        "pin_memory": "loader.pin_memory",
        "shuffle": "loader.shuffle",
        "drop_last": "loader.drop_last",
        "device": _DEVICE,
        "devices": "strategy.devices",
        "gpus": "strategy.devices",
        "accelerator": _DEVICE,
        "sync_batchnorm": "strategy.sync_batchnorm",
        "find_unused_parameters": "strategy.find_unused_parameters",
        "num_nodes": "torchrun (docs/distributed.md)",
        "epochs": _EPOCHS,
        "num_epochs": _EPOCHS,
        "num_train_epochs": _EPOCHS,
        "max_epochs": _EPOCHS,
        "max_steps": _STEPS,
        "max_iters": _STEPS,
        "max_duration": "trainer.max_time, max_epochs or max_steps",
        "max_time": "trainer.max_time",
        "accumulate_grad_batches": _ACCUMULATION,
        "gradient_accumulation_steps": _ACCUMULATION,
        "accumulation_steps": _ACCUMULATION,
        "grad_accum_steps": _ACCUMULATION,
        "gradient_clip_val": _CLIP,
        "gradient_clip_algorithm": "trainer.clip_grad_norm or trainer.clip_grad_value",
        "max_grad_norm": _CLIP,
        "grad_clip": _CLIP,
        "clip_grad": _CLIP,
        "precision": "trainer.precision",
        "mixed_precision": "trainer.precision=bf16 or fp16",
        "amp": "trainer.precision=bf16 or fp16",
        "fp16": "trainer.precision=fp16",
        "bf16": "trainer.precision=bf16",
        "compile": "trainer.compile",
        "torch_compile": "trainer.compile",
        "deterministic": "trainer.deterministic",
        "benchmark": "trainer.cudnn_benchmark",
        "log_every_n_steps": "trainer.log_every_n_steps",
        "logging_steps": "trainer.log_every_n_steps",
        "check_val_every_n_epoch": "trainer.validate_every_n_epochs",
        "val_check_interval": _VALIDATION,
        "eval_steps": "trainer.validate_every_n_steps",
        "num_sanity_val_steps": "trainer.validate_at_start",
        "limit_train_batches": "trainer.limit_train_batches",
        "limit_val_batches": "trainer.limit_val_batches",
        "overfit_batches": "trainer.overfit_batches",
        "fast_dev_run": "debug=fast",
        "gradient_checkpointing": "trainer.activation_checkpointing",
        "enable_progress_bar": "callbacks.progress.bar",
        "enable_checkpointing": "callbacks.checkpoint",
        "logger": "callbacks",
        "save_steps": "callbacks.checkpoint.every_n_steps",
        "save_top_k": "callbacks.checkpoint.save_top_k",
        "patience": "callbacks.early_stopping.patience",
        "monitor": "callbacks.checkpoint.monitor and callbacks.early_stopping.monitor",
        "ckpt_path": _RESUME,
        "resume_from_checkpoint": _RESUME,
        "output_dir": _RUN_DIR,
        "save_dir": _RUN_DIR,
        "log_dir": _RUN_DIR,
        "default_root_dir": _RUN_DIR,
        "experiment_name": "name",
        "exp_name": "name",
        "run_name": "name",
        "loss": "task.loss",
        "criterion": "task.loss",
        "metrics": "task.metrics",
        "num_classes": "data.num_classes",
        "image_size": "data.image_size",
        "img_size": "data.image_size",
        "root": "data.root",
        "data_dir": "data.root",
        "dataset": "data",
        "arch": "model",
    }
)
# Values of `precision` and `accelerator` as others write them.
VALUES = MappingProxyType(
    {
        "gpu": "cuda",
        "16": "fp16",
        "16-mixed": "fp16",
        "16-true": "fp16",
        "float16": "fp16",
        "half": "fp16",
        "bf16-mixed": "bf16",
        "bf16-true": "bf16_true",
        "bfloat16": "bf16",
        "32": "fp32",
        "32-true": "fp32",
        "float32": "fp32",
        "64": "fp64",
        "64-true": "fp64",
        "amp": "bf16",
    }
)


def our_key(key: str) -> str | None:
    """Return what a key is called here that is another framework's or lacks its section."""
    ours = KEYS.get(key.rpartition(".")[2])
    return None if ours == key else ours
