"""What all studies share: settings, run folders, training, checkpoints."""
