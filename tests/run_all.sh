#!/bin/sh
# Run all tests that `make test` runs: tests/run_all.sh PYTHON. It takes two cores.
# The kernels' tests only compute. They run with the lowest priority beside those that wait for
# collectives and commands. Slurm's tests run alone, because Slurm's time limits count seconds.
set -u
python=$1
failed=0
log=$(mktemp)
"$python" -m pytest -n 2 --dist loadfile tests/unit || failed=1
nice -n 19 "$python" -m pytest tests/kernels >"$log" 2>&1 &
kernels=$!
trap 'kill $kernels 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"$python" -m pytest tests/distributed || failed=1
"$python" -m pytest -n 2 --dist loadfile tests/end_to_end || failed=1
echo "tests/kernels, which ran beside these:"
wait $kernels || failed=1
cat "$log"
"$python" -m pytest tests/slurm || failed=1
exit $failed
