#!/usr/bin/env bash
# The bench on a GPU machine that has JAX and no network. Run it from the repository's root:
#
#     experiments/bench/gpu.sh [PACKAGES] [OUT]
#
# PACKAGES is a folder with what that machine's Python lacks, made elsewhere by
#     pip install --target PACKAGES --no-deps jaxtyping wadler-lindig chex einops flax optax tyro ...
# OUT is where results.json and the report go. JAX itself is the machine's own.
set -euo pipefail
packages="${1:-}"
out="${2:-runs/bench/gpu}"
export PYTHONPATH="$PWD${packages:+:$packages}"
python3 -c 'import jax; print(jax.__version__, jax.devices())'
python3 -m experiments bench --preset quick --out "$out"
