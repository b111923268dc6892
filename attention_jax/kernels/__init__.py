"""Kernels: implementations of attention. Each is a module with three functions; see `request`."""
