"""Every option of every optimizer: a value that makes no sense is refused by name when the optimizer is made."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hf_emopt

OPTIMIZERS = [hf_emopt.Muon, hf_emopt.NorMuon, hf_emopt.SOAP, hf_emopt.Shampoo, hf_emopt.KLShampoo]
SENSELESS: list[Any] = [math.nan, math.inf, -1, -1.0, "x", (0.5,), [], {}]
EMPTY_IS_NONE = {"muon_modules", "matrix_modules", "aux_modules", "tensor_parallel_modules", "exponent_override"}
"""Of which an empty collection says that there is none."""


def make(cls: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls([nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))], **{"lr": 1e-2, **options})


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_senseless_values_are_refused_by_name(cls: type) -> None:
    accepted, unnamed = [], []
    names = [name for name in inspect.signature(cls).parameters if name != "params"]
    assert len(names) > 20
    for name in names:
        for value in SENSELESS:
            if name in EMPTY_IS_NONE and isinstance(value, (list, dict)):
                continue
            try:
                make(cls, **{name: value})
            except (ValueError, TypeError) as error:
                if name not in str(error):
                    unnamed.append((name, value, str(error)))
            else:
                accepted.append((name, value))
    assert not accepted
    assert not unnamed


@pytest.mark.parametrize(
    ("cls", "options", "told"),
    [
        (hf_emopt.SOAP, {"weight_decay_type": "adamw"}, "decoupled, l2, corrected, independent"),
        (hf_emopt.SOAP, {"basis_method": "QR"}, "orthogonal_iteration, qr, eigh"),
        (hf_emopt.SOAP, {"basis_method": "first_order"}, "is gone: use 'orthogonal_iteration'"),
        (hf_emopt.Shampoo, {"root_solver": "coupled_higher_order"}, "is gone: use 'auto', 'coupled_newton' or 'eigh'"),
        (hf_emopt.SOAP, {"betas": (0.9, 1.0)}, r"two numbers in \[0, 1\)$"),
        (hf_emopt.SOAP, {"max_preconditioner_dim": True}, "whole number"),
        (hf_emopt.Shampoo, {"matmul_precision": "tf-32"}, "highest, bf16x3, tf32"),
        (hf_emopt.Shampoo, {"root_dtype": torch.float64}, "float32, bfloat16, float16"),
        (hf_emopt.Shampoo, {"betas": (0.9, 1.0)}, "grafting_beta2=1.0, which is the second of the betas"),
        (hf_emopt.Shampoo, {"exponent_override": {"two": 0.5}}, "numbers of dimensions as keys"),
        (hf_emopt.Shampoo, {"exponent_override": {2: -0.5}}, "above 0"),
        (hf_emopt.Muon, {"skip_nonfinite": "no"}, "True or False"),
        (hf_emopt.Muon, {"momentum": True}, r"in \[0, 1\)"),
    ],
)
def test_the_message_says_what_is_accepted(cls: type, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make(cls, **options)


def test_numbers_of_numpy_and_lists_are_accepted() -> None:
    options = {"eps": np.float32(1e-6), "precondition_frequency": np.int64(3), "betas": [np.float64(0.9), 0.95]}
    assert make(hf_emopt.SOAP, **options).param_groups[0]["betas"] == (0.9, 0.95)
    make(hf_emopt.Shampoo, betas=(0.9, 1.0), grafting="adagrad", lr=torch.tensor(0.1))
    make(hf_emopt.Shampoo, betas=(0.9, 1.0), grafting_beta2=0.9, exponent_override={2: 0.5})
