"""Data: the grammar, parallel text, and batches of both."""
