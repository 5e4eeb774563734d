"""Matrix functions for optimizers. Knows nothing of parameters, modules or ranks."""

from hf_emopt.linalg.coefficients import NS_COEFFICIENTS, CoefficientSet, ResolvedCoefficients, resolve_coefficients
from hf_emopt.linalg.newton_schulz import default_dtype, newton_schulz, newton_schulz_flops

__all__ = [
    "NS_COEFFICIENTS",
    "CoefficientSet",
    "ResolvedCoefficients",
    "default_dtype",
    "newton_schulz",
    "newton_schulz_flops",
    "resolve_coefficients",
]
