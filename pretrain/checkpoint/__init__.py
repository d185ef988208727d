"""Layout-free checkpoints: fp32 masters and Adam moments by global name and shape, beside JSON for the rest."""
