"""Predict what a run costs by counting, without the hardware that it is planned for.

Two ways meet here. `simulation` runs the real code on a simulated rank and counts what it does
(`pretrain bench step`). The rest is arithmetic without torch (`pretrain plan`): it computes memory
and time of every layout in milliseconds, and tests compare it with what the first way counts.
"""
