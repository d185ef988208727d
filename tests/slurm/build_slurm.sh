#!/bin/bash
# Build another version of Slurm than this Debian's, from the sources of a later Debian, for tests/slurm:
#
#     tests/slurm/build_slurm.sh PREFIX [SUITE]     # as root, on Debian; SUITE is trixie (Slurm 24.11) by default
#     SLURM_PREFIX=PREFIX python -m pytest tests/slurm
#
# Debian's own packages of SUITE would need its C library. This takes about five minutes and 1.5 GB.
# `make torture` does both steps (tests/slurm/test_versions.py).
set -euo pipefail
prefix=$(realpath -m "$1")
suite=${2:-trixie}
export DEBIAN_FRONTEND=noninteractive

apt-get update -q
apt-get install -q -y --no-install-recommends libmunge-dev g++ make pkg-config bzip2 xz-utils
# The mirror that this machine's apt is set to.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sed 1q)
if [ -z "$mirror" ]; then
    echo "error: apt has no Debian mirror in its configuration, from which to get Slurm's sources" >&2
    exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists,archives}/partial "$work/source"
cat >"$work/later.sources" <<END
Types: deb-src
URIs: $mirror
Suites: $suite
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
apt=(apt-get -q -o "Dir::Etc::sourcelist=$work/later.sources" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work" -o APT::Sandbox::User=root)
"${apt[@]}" update
cd "$work"
"${apt[@]}" source --download-only --tar-only slurm-wlm
tar xf slurm-wlm_*.orig.tar.* -C source --strip-components=1

cd source
# Several slurmd on one machine, and without what the tests do not use.
CFLAGS='-O1 -Wl,--as-needed' ./configure --quiet --prefix="$prefix" --sysconfdir="$prefix/etc" \
    --with-munge=/usr --enable-multiple-slurmd --disable-pam --disable-x11 --disable-slurmrestd \
    --disable-sview --without-{hwloc,json,jwt,yaml,lua,hdf5,pmix,bpf}
make --silent
make --silent install
"$prefix/sbin/slurmd" -V
