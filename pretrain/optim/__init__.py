"""The optimizer: ZeRO, the step, and the learning rate."""
