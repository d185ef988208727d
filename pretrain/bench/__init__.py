"""Measure speed and memory: training, attention, data, generation, checkpoints."""
