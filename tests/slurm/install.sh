#!/bin/sh
# shellcheck disable=SC2086  # words are split on purpose
# Debian's Slurm and its headers, for tests/slurm: as root, and without a service being started, now or later. `make test` calls it.
set -eu
packages="slurmctld slurmd slurm-client munge libslurm-dev g++"
missing=
for program in slurmctld slurmd munged sbatch cc; do
    command -v $program >/dev/null || missing="$missing $program"
done
# For tests/slurm/pyxis.c.
echo '#include <slurm/spank.h>' | cc -E - >/dev/null 2>&1 || missing="$missing slurm/spank.h"
if [ -z "$missing" ]; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no Slurm here (missing:$missing): tests will be skipped. Debian, as root: apt-get install $packages" >&2
    exit 0
fi

# What a package's scripts ask before they start a service, invoke-rc.d(8): 101 forbids it.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends $packages
if command -v systemctl >/dev/null; then
    systemctl disable munge slurmctld slurmd 2>/dev/null || true
fi
