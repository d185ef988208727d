"""Text to batches: documents -> tokens -> webdataset shards -> samples in an order that is pure arithmetic."""
