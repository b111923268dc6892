"""The cases of the bench: contestants, and the target ratio of each case."""
