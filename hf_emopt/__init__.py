"""Muon and its kin for Hugging Face Trainer and Accelerate: importing this makes ``optim="muon"`` known to transformers."""

from typing import TYPE_CHECKING

from hf_emopt._version import __version__
from hf_emopt.checkpoint.files import CheckpointError, newest_checkpoint
from hf_emopt.linalg.newton_schulz import newton_schulz
from hf_emopt.optimizers import SOAP, KLShampoo, Muon, NorMuon, Shampoo
from hf_emopt.optimizers.qk_clip import qk_clip
from hf_emopt.optimizers.registration import public_name as __getattr__  # noqa: F401 - for the module itself
from hf_emopt.optimizers.registration import register_when_imported
from hf_emopt.routing.route import route_parameters

if TYPE_CHECKING:
    from hf_emopt.integrations.accelerate import Accelerator, EmoptPlugin
    from hf_emopt.integrations.callback import EmoptCallback
    from hf_emopt.integrations.max_logits import MaxLogits
    from hf_emopt.integrations.qk_clip_callback import QKClipCallback
    from hf_emopt.integrations.trainer import EmoptTrainer, EmoptTrainerMixin

__all__ = [
    "SOAP", "Accelerator", "CheckpointError", "EmoptCallback", "EmoptPlugin", "EmoptTrainer", "EmoptTrainerMixin",
    "KLShampoo", "MaxLogits", "Muon", "NorMuon", "QKClipCallback", "Shampoo", "__version__", "newest_checkpoint",
    "newton_schulz", "qk_clip", "route_parameters",
]  # fmt: skip

register_when_imported()
