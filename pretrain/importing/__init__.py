"""Import a Hugging Face model as a run: the mirror of `pretrain.export`, whose tables it reads."""
