"""The steps of `benchmarks/gpu_check.sh`: what is checked on an accelerator, and who starts it."""
