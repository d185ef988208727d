#!/usr/bin/env bash
# Run all tests with a Python, as `make test` does:  tests/all.sh .venv/bin/python
#
# tests/slurm mostly waits for Slurm's clocks, and the others compute. They run beside each other, and
# what computes gives way: both cores are always busy, and Slurm is as quick as alone. What tests/slurm
# says goes to a file, and is printed after what the others say.
set -uo pipefail
python=$1
said=$(mktemp)
trap 'rm -f "$said"' EXIT

# Wait for a process and return its exit code. A signal ends bash's own `wait` before that.
finished() {
    local code
    while wait "$1"; code=$?; kill -0 "$1" 2>/dev/null; do :; done
    return "$code"
}

# Each session is a group of processes of its own, so a signal for this script has to be passed on.
set -m
"$python" -m pytest -n 2 --dist loadfile tests/slurm >"$said" 2>&1 &
slurm=$!
# In this order: the ranks of tests/distributed live as long as its tests follow each other, and
# files that take long should not begin last.
nice "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
    tests/distributed tests/end_to_end tests/kernels tests/unit &
others=$!
for signal in INT TERM HUP; do
    # shellcheck disable=SC2064  # which processes there are is known now
    trap "kill -$signal -- -$slurm -$others 2>/dev/null" "$signal"
done

failed=0
finished "$others" || failed=1
echo '== tests/slurm'
tail -n +1 -f --pid="$slurm" "$said" &
finished $!
((failed)) && echo '== the tests of other folders failed, see above'
finished "$slurm" || failed=1
exit "$failed"
