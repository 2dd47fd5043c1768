#!/usr/bin/env bash
# Trains on nodes of SLURM: sbatch slurm.sh CONFIG [section.key=value]...
#
# CONFIG, the model, the data and the run directory are on a file system of all nodes. The same command, or a
# requeued job, goes on from the newest checkpoint. Fix parallel.shards, so that another number of nodes may.
# Nodes with several networks: each takes the one that leads to the first node's name. To name another interface,
# export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME before torchrun.
#SBATCH --job-name=megatrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "usage: sbatch $0 CONFIG [section.key=value]..." >&2
    exit 2
fi
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes%%$'\n'*}

# One torchrun per node starts its ranks. After SIGTERM, ten minutes before the time is up, a step is finished
# and saved: --shutdown-timeout is the time for that, and megatrain plan says how long it takes (stop). PyTorch 2.11 does not know the option, and takes 30 s.
patience=()
if torchrun --help 2>&1 | grep -q -- --shutdown-timeout; then patience=(--shutdown-timeout 540); fi
exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${RANKS_PER_NODE:-$SLURM_GPUS_ON_NODE}" \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$first:${RENDEZVOUS_PORT:-29500}" \
    --max-restarts 3 \
    "${patience[@]}" \
    -m megatrain train "$@"
