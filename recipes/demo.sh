#!/usr/bin/env bash
# The demo: make a tiny checkpoint and tiles, train in-batch on two ranks, mine hard negatives with that adapter, filter them with the
# demo judge over HTTP, train again from the base with what is left, compare base and both adapters, export the better one.
# VENV, DEMO, SEED and ARMS come from the Makefile.
set -euo pipefail
python="$VENV/bin/python"
started=$SECONDS
# The operations of this tiny model are too small to share between threads: two ranks of one thread use two cores better.
export OMP_NUM_THREADS=1

say() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - started)); }

say "a tiny checkpoint and tiles"
"$python" -m contrastors.demo --output "$DEMO" --seed "$SEED" --overwrite
data="$DEMO/data"
train=(
  "$python" -m torch.distributed.run --standalone --nproc_per_node=2 train_contrastors.py
  --overwrite --seed "$SEED" --model "$DEMO/model" --eval-jsonl "$data/eval.jsonl"
  --lora-vit --batch-size 16 --grad-cache-chunk 48 --retain-graphs 2 --grad-reduction mean --lr 5e-3 --logit-scale-lr 1e-2
  --max-steps 120 --warmup-steps 12 --eval-steps 60 --save-steps 0 --num-workers 1
)

say "training with in-batch negatives"
"${train[@]}" --train-jsonl "$data/train.jsonl" --output-dir "$DEMO/in_batch"

say "mining hard negatives with that adapter"
"$python" -m torch.distributed.run --standalone --nproc_per_node=2 mine_hard_negatives.py --overwrite \
  --input "$data/train.jsonl" --corpus "$data/corpus.jsonl" \
  --model "$DEMO/model" --adapter "$DEMO/in_batch/checkpoint-120" --num-workers 1 \
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
"${train[@]}" --train-jsonl "$DEMO/filtered.jsonl" --num-hard-negatives 2 --max-steps 180 --output-dir "$DEMO/hard_negatives"

adapters=(--adapter "$DEMO/in_batch/checkpoint-120" --adapter "$DEMO/hard_negatives/checkpoint-180")
if [ "${ARMS:-}" = all ]; then
  say "two more arms: in-batch with the compute of hard negatives, and hard negatives without the filter"
  "${train[@]}" --train-jsonl "$data/train.jsonl" --output-dir "$DEMO/in_batch_longer" --max-steps 350
  "${train[@]}" --train-jsonl "$DEMO/mined.jsonl" --num-hard-negatives 2 --max-steps 180 --output-dir "$DEMO/unfiltered"
  adapters+=(--adapter "$DEMO/in_batch_longer/checkpoint-350" --adapter "$DEMO/unfiltered/checkpoint-180")
fi

say "what the filter removed"
"$python" -m contrastors.demo --output "$DEMO" --filter-quality

say "base against adapters: unseen tiles, then the hard set of 300 tiles, four siblings in each of 75 topics"
for name in eval eval_hard; do
  "$python" verify_embeddings.py --overwrite "${adapters[@]}" --eval-jsonl "$data/$name.jsonl" --num-workers 1 \
    --output "$DEMO/verify_$name.json" --plot "$DEMO/verify_$name.png"
done

say "exporting the better adapter for sentence-transformers, and reading it back"
"$python" -m contrastors.export --overwrite --adapter "$DEMO/hard_negatives/checkpoint-180" --format sentence-transformers \
  --output "$DEMO/export"

say "done"
echo "curves   $DEMO/hard_negatives/curves.png"
echo "plot     $DEMO/verify_eval_hard.png"
echo "look at  $DEMO/filtered.html"
echo "adapter  $DEMO/hard_negatives/checkpoint-180"
echo "export   $DEMO/export"
echo "$((SECONDS - started)) s"
