"""Long-context checks beyond perplexity: needles, copies at a distance, and long documents."""
