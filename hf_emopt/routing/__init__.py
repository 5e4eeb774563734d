"""Routing: which parts of which parameter are matrices, decided by the types of the modules that use them."""

from hf_emopt.routing.architectures import register_architecture
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.parameter import ArchitectureRule, Decision, ParameterInfo, aux, matrix
from hf_emopt.routing.route import route_named_parameters, route_parameters, route_parameters_list
from hf_emopt.routing.table import ParameterRoute, RouteTable, coverage_warning

__all__ = [
    "ArchitectureRule",
    "Decision",
    "MatrixView",
    "ParameterInfo",
    "ParameterRoute",
    "RouteTable",
    "aux",
    "coverage_warning",
    "matrix",
    "register_architecture",
    "route_named_parameters",
    "route_parameters",
    "route_parameters_list",
]
