"""Predict what a run costs by counting, without the hardware that it is planned for."""
