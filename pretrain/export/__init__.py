"""A trained model as a stock Hugging Face model, and the proof that it is the same one."""

from pretrain.export.huggingface import to_huggingface
from pretrain.export.parity import ParityReport, check_parity
from pretrain.export.targets import check_exportable

__all__ = ["ParityReport", "check_exportable", "check_parity", "to_huggingface"]
