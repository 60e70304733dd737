#!/usr/bin/env bash
#SBATCH --job-name=contrastors
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=B:TERM@120
# One torchrun agent a node. The run folder and the data must be on a file system that all nodes see.
# Requeue the job as it is: --resume latest goes on from the newest whole checkpoint, or starts anew.
set -euo pipefail
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun torchrun \
  --nnodes="$SLURM_NNODES" --nproc_per_node=8 --max-restarts=3 \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head_node:29500" \
  train_contrastors.py --resume latest --output-dir "${OUTPUT:?folder of the run}" \
  --train-jsonl "${TRAIN:?pairs.jsonl}" --eval-jsonl "${EVAL:?eval.jsonl}" \
  --batch-size 32 --grad-cache-chunk 4 --num-workers 6
