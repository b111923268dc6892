"""Shared parts of the studies: settings, run folders, training, checkpoints."""
