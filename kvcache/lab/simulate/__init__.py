"""Simulate requests against managers: one run, grids of them, and the model of serving that weighs their hits."""
