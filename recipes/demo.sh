#!/usr/bin/env bash
# The demo: make a tiny checkpoint and tiles, train in-batch, mine hard negatives with that adapter, filter them with the
# demo judge over HTTP, train again from the base with what is left, compare base and both adapters.
# VENV, DEMO and SEED come from the Makefile.
set -euo pipefail
python="$VENV/bin/python"
started=$SECONDS
# Two threads that wait for each other by spinning lose a factor of ten where another process wants a core.
export OMP_WAIT_POLICY=passive
# In a process group without a proxy: the judge is on this machine.
export NO_PROXY=127.0.0.1

say() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - started)); }

say "a tiny checkpoint and tiles"
"$python" -m contrastors.demo --output "$DEMO" --seed "$SEED" --overwrite
data="$DEMO/data"
train=(
  "$python" train_contrastors.py --overwrite --seed "$SEED" --model "$DEMO/model" --eval-jsonl "$data/eval.jsonl"
  --lora-vit --batch-size 32 --grad-cache-chunk 32 --lr 5e-3 --logit-scale-lr 1e-2
  --max-steps 150 --warmup-steps 15 --eval-steps 75 --save-steps 0 --num-workers 2
)

say "training with in-batch negatives"
"${train[@]}" --train-jsonl "$data/train.jsonl" --output-dir "$DEMO/in_batch"

say "mining hard negatives with that adapter"
"$python" mine_hard_negatives.py --overwrite --input "$data/train.jsonl" --corpus "$data/corpus.jsonl" \
  --model "$DEMO/model" --adapter "$DEMO/in_batch/checkpoint-150" --num-workers 2 \
  --num-negatives 2 --n-docs 20 --output "$DEMO/mined.jsonl" --report "$DEMO/mined.html"

say "filtering false negatives (demo judge: a local server that looks the tiles up, no model)"
rm -f "$DEMO/judge.txt"
"$python" -m contrastors.demo_judge --facts "$data/facts.jsonl" --address-file "$DEMO/judge.txt" &
judge=$!
trap 'kill $judge 2>/dev/null || true' EXIT
until [ -s "$DEMO/judge.txt" ]; do sleep 0.1; kill -0 $judge; done
"$python" filter_hard_negatives_vqa.py --overwrite --input "$DEMO/mined.jsonl" --output "$DEMO/filtered.jsonl" \
  --base-url "$(cat "$DEMO/judge.txt")" --model demo-judge --candidate-k 10 --num-hard-negatives 2 --concurrency 8 \
  --report "$DEMO/filtered.html"
kill $judge

say "training with the filtered hard negatives, from the base"
"${train[@]}" --train-jsonl "$DEMO/filtered.jsonl" --num-hard-negatives 2 --output-dir "$DEMO/hard_negatives"

say "evaluating on the hard set: 300 tiles, four siblings in each of 75 topics"
measure=("$python" train_contrastors.py --eval-only --overwrite --eval-jsonl "$data/eval_hard.jsonl" --num-workers 2)
"${measure[@]}" --model "$DEMO/model" --output-dir "$DEMO/base_on_hard"
for run in in_batch hard_negatives; do
  "${measure[@]}" --resume "$DEMO/$run/checkpoint-150" --output-dir "$DEMO/${run}_on_hard"
done

say "results"
"$python" -m contrastors.demo --output "$DEMO" --table
echo
echo "curves   $DEMO/hard_negatives/curves.png"
echo "look at  $DEMO/filtered.html"
echo "adapter  $DEMO/hard_negatives/checkpoint-150"
echo "$((SECONDS - started)) s"
