"""Export a trained model as a stock Hugging Face model, and verify that it computes the same."""

from pretrain.huggingface.folder import to_huggingface
from pretrain.huggingface.parity import ParityReport, check_parity
from pretrain.huggingface.table import check_exportable

__all__ = ["ParityReport", "check_exportable", "check_parity", "to_huggingface"]
