"""Layout-free checkpoints: fp32 masters and Adam moments by global name, and JSON for the rest."""
