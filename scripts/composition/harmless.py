"""Keys whose changes affect the place, the speed or the output of a run, but not its result."""

_HARMLESS = (
    "name",
    "run_dir",
    "resume",
    "resume_policy",
    "dry_run",
    "strategy",
    "sweep",
    "loader.num_workers",
    "loader.pin_memory",
    "loader.prefetch_factor",
    "loader.persistent_workers",
    "loader.timeout",
    "loader.multiprocessing_context",
    "loader.non_blocking",
    "loader.prefetch_to_device",
    "loader.eval_batch_size",
    "loader.eval",
    "data.root",
    "data.cache",
    "data.cache_bytes",
    "data.cache_dir",
    "data.test",
    "data.predict",
    "trainer.log_every_n_steps",
    "trainer.max_time",
    "trainer.gradient_accumulation_steps",
    "trainer.limit_test_batches",
    "trainer.validate_at_start",
    "trainer.detect_anomaly",
    "trainer.compile",
    "trainer.activation_checkpointing",
    "trainer.activation_checkpointing_segments",
    "callbacks.progress",
    "callbacks.tensorboard",
    "callbacks.checkpoint",
    "callbacks.model_summary",
    "callbacks.lr_monitor",
    "callbacks.throughput",
    "callbacks.memory",
    "callbacks.profiler",
)


def trains_the_same(key: str) -> bool:
    """Return whether a run whose value of a dotted key is changed trains the same."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in _HARMLESS)
