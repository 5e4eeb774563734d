"""Routing: which parts of which parameter are matrices, decided by the types of the modules that use them."""

from hf_emopt.routing.architectures import ArchitectureRule, register_architecture
from hf_emopt.routing.parameter import Decision, ParameterInfo, aux, matrix
from hf_emopt.routing.route import (
    ParameterRoute,
    RouteTable,
    coverage_warning,
    route_named_parameters,
    route_parameters,
    route_parameters_list,
)
from hf_emopt.routing.unit import Unit

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
