"""One command for the day on which a GPU is at hand: what only a GPU can show, in parts.

    python -m benchmarks.gpu_day --out RESULTS [--part NAME ...] [--budget-seconds N]
    python -m benchmarks.gpu_day --list

Every part takes less than nine minutes and writes what it has found as it goes, so that a machine
lent for ten minutes at a time is enough: call the command again, and it goes on where it stopped.
The parts stand in the order of their importance, and one is begun where there is time for it.
RESULTS/summary.md holds everything. Without a GPU the same parts run in tiny sizes on the CPU, and
say so; such numbers show that a part works and nothing else.

benchmarks/README.md lists the packages that the machine needs.
"""
