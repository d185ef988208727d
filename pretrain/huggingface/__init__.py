"""Export a trained model as a stock Hugging Face model, import one, and verify both."""
