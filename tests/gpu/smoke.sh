#!/usr/bin/env bash
# One GPU, under five minutes, torch 2.11 or newer: bash tests/gpu/smoke.sh [cuda|cpu]. What it prints belongs into results/.
# Needs torch, numpy, PyYAML and tokenizers; the default recipe is trained by its command where Hydra and the rest are installed too.
set -euo pipefail
cd "$(dirname "$0")/../.."
device=${1:-cuda}
python=${PYTHON:-python3}

"$python" -m tests.gpu.smoke "$device"

if "$python" -c 'import hydra, lightning, datasets, wandb, tokenizers' 2>/dev/null; then
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  "$python" -m recipes.train precision=bf16 data=synthetic trainer.max_steps=30 logger=none "run.root=$root"
  tail -n 1 "$root"/tiny/*/metrics.jsonl
else
  echo "recipes.train: not run, since Hydra, Lightning, datasets, wandb or tokenizers is not installed"
fi
