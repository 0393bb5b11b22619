#!/bin/bash
# Judge a target as a job array of Slurm, a shard a task, and put the shards together in a job of its own.
#
#     sbatch --array=1-8 --gpus=1 ci/slurm_array.sh my_port:Port results
#     sbatch --dependency=afterany:JOB ci/slurm_array.sh --merge results
#
# `afterany`, not `afterok`: a shard in which cases fail ends with exit code 1 and has a report all the same.
#SBATCH --job-name=conformance
#SBATCH --time=01:00:00
#SBATCH --cpus-per-task=2
set -euo pipefail

if [ "$#" -ne 2 ]; then
    echo "usage: sbatch --array=1-N $0 TARGET DIR, then sbatch $0 --merge DIR" >&2
    exit 2
fi
if [ "$1" = --merge ]; then
    exec conformance merge "$2"/shard-*.jsonl --json "$2/report.jsonl" --junit "$2/report.xml"
fi
: "${SLURM_ARRAY_TASK_ID:?run this as a job array: sbatch --array=1-N}"
: "${SLURM_ARRAY_TASK_COUNT:?run this as a job array: sbatch --array=1-N}"
mkdir -p "$2"
exec conformance check "$1" --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" \
    --json "$2/shard-$SLURM_ARRAY_TASK_ID.jsonl"
