#!/usr/bin/env bash
# Check everything on a machine with one accelerator and no network: benchmarks/gpu_check.sh --help
#
# It installs nothing but the wheels in $WHEELS (default .whl), and those into a temporary folder.
# PYTHON names the interpreter that has torch. SIMULATED=1 takes the simulated accelerator.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root:$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
