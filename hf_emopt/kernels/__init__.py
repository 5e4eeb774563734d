"""Device code and how it is launched: Triton, CUDA C++, graphs, streams, passes over many tensors."""
