"""Experiments that compare attention mechanisms; ``python -m experiments --help`` lists them."""
