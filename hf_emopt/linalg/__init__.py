"""Matrix functions for optimizers. Knows nothing of parameters, modules or ranks."""

from hf_emopt.linalg.coefficients import NS_COEFFICIENTS, CoefficientSet, ResolvedCoefficients, resolve_coefficients
from hf_emopt.linalg.eigenbasis import EigenbasisRefresh, eigenbasis, eigendecomposition, refresh_eigenbasis
from hf_emopt.linalg.inverse_root import InverseRoot, inverse_root
from hf_emopt.linalg.matmul_precision import matmul_precision
from hf_emopt.linalg.newton_schulz import default_dtype, newton_schulz, newton_schulz_flops
from hf_emopt.linalg.retry_ladder import LadderReport, LadderResult, with_ladder

__all__ = [
    "NS_COEFFICIENTS",
    "CoefficientSet",
    "EigenbasisRefresh",
    "InverseRoot",
    "LadderReport",
    "LadderResult",
    "ResolvedCoefficients",
    "default_dtype",
    "eigenbasis",
    "eigendecomposition",
    "inverse_root",
    "matmul_precision",
    "newton_schulz",
    "newton_schulz_flops",
    "refresh_eigenbasis",
    "resolve_coefficients",
    "with_ladder",
]
