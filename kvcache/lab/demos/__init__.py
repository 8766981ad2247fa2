"""The workloads of the demos."""
