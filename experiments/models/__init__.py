"""Models that are not the library's own."""
