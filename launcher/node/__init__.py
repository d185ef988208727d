"""Run on the compute node: start the ranks of an attempt, watch them, and act on how they end.

- supervise.py: makes an attempt and decides if another one follows; the heart of restarts
- series.py: judges the attempts made so far: which made no progress, and may another succeed
- waiting.py: says what is waited for while no attempt is made
- watchdog.py: tells from the ranks' progress file that they are stuck
- signals.py: records the signals sent to the launcher; blocks them while ranks are started
- ranks.py: what the supervisor needs of an attempt's ranks, wherever they run
- local.py: `launcher local`, ranks as child processes of the launcher on one machine
- srun.py: `launcher attempt`, ranks behind srun inside a Slurm job
- evaluation.py: `launcher evaluation`, the evaluation of one checkpoint inside a Slurm job
"""
