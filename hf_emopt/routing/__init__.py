"""Routing: which parts of which parameter are matrices, decided by the types of the modules that use them."""

from .architectures import ArchitectureRule, register_architecture
from .parameter import Decision, ParameterInfo, aux, matrix
from .route import (
    ParameterRoute,
    RouteTable,
    coverage_warning,
    route_named_parameters,
    route_parameters,
    route_parameters_list,
)
from .unit import Unit

__all__ = [
    "ArchitectureRule",
    "Decision",
    "ParameterInfo",
    "ParameterRoute",
    "RouteTable",
    "Unit",
    "aux",
    "coverage_warning",
    "matrix",
    "register_architecture",
    "route_named_parameters",
    "route_parameters",
    "route_parameters_list",
]
