"""Build this rank's part of the model from a config, and run batches through it."""
