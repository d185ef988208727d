"""Turn text into batches: documents, tokens, webdataset shards, and samples in a computed order."""
