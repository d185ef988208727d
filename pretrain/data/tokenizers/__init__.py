"""The kinds of tokenizers and the training of one; pretrain.data.tokenizer is the way in."""
