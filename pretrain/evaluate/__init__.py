"""Perplexity by length, protocol and position, and the report made of it."""
