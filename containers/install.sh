#!/bin/sh
# Install the project into an image of Debian 12: both recipes beside this file run it, as root,
# in a copy of the clone. `containers/install.sh constraints-v100.txt` makes an image for V100s.
#
# CUDA comes with torch's packages; the driver's libraries come from the host (--gpus all, --nv).
set -eu
constraints=${1:-constraints.txt}
cd "$(dirname "$0")/.."

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# gcc, g++ and Python's headers: Triton and torch.compile build what they launch kernels with.
# libibverbs and its drivers: without them NCCL falls back to TCP on an InfiniBand network.
apt-get install -q -y --no-install-recommends \
    ca-certificates python3 python3-venv python3-dev gcc g++ \
    libibverbs1 ibverbs-providers librdmacm1
rm -rf /var/lib/apt/lists/*

python3 -m venv /opt/pretrain
# Not editable: the image does not need the clone.
/opt/pretrain/bin/pip install --no-cache-dir -c "$constraints" '.[data,wandb]'
/opt/pretrain/bin/pretrain --version
