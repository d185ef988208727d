"""Train short, test long: pretraining of GPTs with ALiBi in any tensor x pipeline x data-parallel layout."""
