#!/usr/bin/env bash
# The demo: make a tiny checkpoint and tiles, train an adapter, evaluate base and adapter on both evaluation sets.
# VENV, DEMO and SEED come from the Makefile.
set -euo pipefail
python="$VENV/bin/python"
started=$SECONDS
# Two threads that wait for each other by spinning lose a factor of ten where another process wants a core.
export OMP_WAIT_POLICY=passive

"$python" -m contrastors.demo --output "$DEMO" --seed "$SEED" --overwrite
"$python" train_contrastors.py \
  --model "$DEMO/model" --train-jsonl "$DEMO/data/train.jsonl" --eval-jsonl "$DEMO/data/eval.jsonl" \
  --output-dir "$DEMO/run" --overwrite --seed "$SEED" \
  --lora-vit --batch-size 32 --grad-cache-chunk 32 --lr 5e-3 --logit-scale-lr 1e-2 \
  --max-steps 150 --warmup-steps 15 --eval-steps 50 --save-steps 50 --num-workers 2
for name in eval eval_hard; do
  "$python" train_contrastors.py --eval-only --overwrite --model "$DEMO/model" --num-workers 2 \
    --eval-jsonl "$DEMO/data/$name.jsonl" --output-dir "$DEMO/base_$name"
  "$python" train_contrastors.py --eval-only --overwrite --resume "$DEMO/run/checkpoint-150" \
    --eval-jsonl "$DEMO/data/$name.jsonl" --output-dir "$DEMO/trained_$name"
done
"$python" -m contrastors.demo --output "$DEMO" --table
echo "curves: $DEMO/run/curves.png   adapter: $DEMO/run/checkpoint-150   $((SECONDS - started)) s"
