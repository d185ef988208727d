"""Evaluate checkpoints: perplexity by window length, protocol and position, and reports of it."""
