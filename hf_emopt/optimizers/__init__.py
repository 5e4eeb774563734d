"""The optimizers a user names: thin classes whose docstrings say everything, over :class:`MatrixOptimizer`."""

from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.optimizers.muon import Muon, NorMuon
from hf_emopt.optimizers.shampoo import KLShampoo, Shampoo
from hf_emopt.optimizers.soap import SOAP

__all__ = ["OPTIMIZERS", "PREFIX", "SOAP", "KLShampoo", "Muon", "NorMuon", "Shampoo"]

PREFIX = "emopt_"
OPTIMIZERS: dict[str, type[MatrixOptimizer]] = {
    "muon": Muon,
    "normuon": NorMuon,
    "soap": SOAP,
    "shampoo": Shampoo,
    "kl_shampoo": KLShampoo,
}
"""The class by the name that users write, with or without the prefix. A new optimizer is one line here."""
