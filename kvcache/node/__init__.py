"""One host pool for all engines of a machine: an owner process, and a client in each engine."""
