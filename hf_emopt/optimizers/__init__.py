"""The optimizers a user names: thin classes whose docstrings say everything, over :class:`MatrixOptimizer`."""

from hf_emopt.optimizers.muon import Muon, NorMuon
from hf_emopt.optimizers.shampoo import KLShampoo, Shampoo
from hf_emopt.optimizers.soap import SOAP

__all__ = ["SOAP", "KLShampoo", "Muon", "NorMuon", "Shampoo"]
