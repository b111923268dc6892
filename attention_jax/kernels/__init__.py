"""Kernels: how. Each is a module with `why_not(request)` and `run(request)`; see `request`."""
