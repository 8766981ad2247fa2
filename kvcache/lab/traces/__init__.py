"""Read, generate and store traces of requests."""
