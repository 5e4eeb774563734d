"""Optimizer state out of and into files, of any layout."""
