"""From a config to this rank's part of the model, and what a position method adds to it."""
