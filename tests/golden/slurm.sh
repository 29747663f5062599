#!/bin/bash
#SBATCH --job-name=Long_1m
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --output=/data/runs/Long_1m/slurm-%j.log
#SBATCH --signal=USR1@300
#SBATCH --partition=gpu
#SBATCH --time=7-00:00:00
#SBATCH --mem=0
set -euo pipefail
export GLOO_SOCKET_IFNAME=ib0
export HF_HOME='/data/hugging face'
export NCCL_DEBUG=WARN
export NCCL_IB_HCA='=mlx5_0,mlx5_1'
export NCCL_IB_RETRY_CNT=7
export NCCL_IB_TIMEOUT=22
export NCCL_SOCKET_IFNAME='=ib0'
export OMP_NUM_THREADS=1
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export FIRST_NODE=${hosts%%$'\n'*}
# one torchrun a node; when one fails, srun ends the others
# shellcheck disable=SC2016  # the nodes expand what is quoted
srun --nodes=4 --ntasks-per-node=1 --cpus-per-task=64 --kill-on-bad-exit=1 bash -c 'exec /opt/venv/bin/python -m launch.node /data/runs/Long_1m/verdict/node"$SLURM_NODEID" 8 /opt/venv/bin/python -m torch.distributed.run --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$FIRST_NODE:29600" --local-addr "$SLURMD_NODENAME" --rdzv-conf "is_host=$([ "$SLURM_NODEID" = 0 ] && echo 1 || echo 0),join_timeout=900,read_timeout=900" --nnodes 4 --nproc-per-node 8 --max-restarts 3 -m train run.toml --set train.steps=20 --set '"'"'data.pattern='"'"'"'"'"'"'"'"'$(date)$$'"'"'"'"'"'"'"'"''"'"' --set launch.scheduler=slurm'
