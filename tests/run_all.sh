#!/bin/sh
# Run all tests that `make test` runs: tests/run_all.sh PYTHON. It takes two cores.
# Slurm's tests and those of the commands wait most of the time. Meanwhile those that compute run
# with the lowest priority. The ranks of tests/distributed run alone: where one has to wait for a
# core, all wait for it.
set -u
python=$1
failed=0
log=$(mktemp)
nice -n 19 "$python" -m pytest -n 2 --dist loadfile tests/unit tests/kernels >"$log" 2>&1 &
computing=$!
trap 'kill $computing 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$python" -m pytest tests/slurm || failed=1
"$python" -m pytest -n 2 --dist loadfile tests/end_to_end || failed=1
echo "tests/unit and tests/kernels, which run beside these:"
wait $computing || failed=1
cat "$log"
"$python" -m pytest tests/distributed || failed=1
exit $failed
