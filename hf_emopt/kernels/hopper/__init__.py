"""Symmetric products in CUDA C++ for sm_90a, on clusters of two multiprocessors, compiled at run time by NVRTC."""
