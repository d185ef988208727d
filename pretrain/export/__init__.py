"""Export a trained model as a stock Hugging Face model, and verify that it computes the same."""

from pretrain.export.huggingface import to_huggingface
from pretrain.export.parity import ParityReport, check_parity
from pretrain.export.selection import check_exportable

__all__ = ["ParityReport", "check_exportable", "check_parity", "to_huggingface"]
