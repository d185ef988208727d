"""Predict the cost of a run by counting, without the hardware for which it is planned.

There are two approaches. `simulation` runs the real code on a simulated rank and counts what it
does (`pretrain bench step`). The rest is arithmetic without torch (`pretrain plan`): within
milliseconds it computes memory and time of a layout, and tests compare it with those counts.
"""
