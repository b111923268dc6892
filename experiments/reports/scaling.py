"""The report of the scaling study."""
