"""`perdure`, for people: parses and calls."""
