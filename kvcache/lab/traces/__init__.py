"""Read, generate and hold traces of requests."""
