#!/usr/bin/env bash
# Trains two seeds at the same time on one GPU (one each if there are more), in under ten minutes.
#
#   OUT=folder bash training/run.sh [minutes of training, default 7.2 [options of training.train]]
#
# Leaves $OUT/seed0 and $OUT/seed1, each with model.safetensors, log.json and console.txt; then run
# `python -m training.collect $OUT`. Exit status 0 only if both seeds were trained and evaluated.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${OUT:?folder for the results}"
minutes="${1:-7.2}"
scratch="$(mktemp -d)"
export PYTHONPATH=src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 RAYON_NUM_THREADS=1
gpus="$(nvidia-smi -L | wc -l)"
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader

TOKENIZERS_PARALLELISM=false nice -n 10 python3 -m training.data \
  --out "$scratch/data" --seconds 240 &
data=$!
seeds=()
for seed in 0 1; do
  mkdir -p "$OUT/seed$seed"
  CUDA_VISIBLE_DEVICES=$((seed % gpus)) python3 -m training.train --data "$scratch/data" \
    --out "$OUT/seed$seed" --state "$scratch/seed$seed.pt" --seed "$seed" \
    --minutes "$minutes" "${@:2}" > >(tee "$OUT/seed$seed/console.txt") 2>&1 &
  seeds+=($!)
done
failed=0
for process in "${seeds[@]}"; do
  wait "$process" || failed=1
done
[ "$failed" = 0 ] || kill "$data" 2> /dev/null
wait "$data" || failed=1
sleep 1
echo "$(find "$scratch/data" -name '*.npy' | wc -l) shards"
rm -rf "$scratch"
exit "$failed"
