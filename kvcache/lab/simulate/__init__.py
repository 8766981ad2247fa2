"""Simulate requests against managers: single runs, grids of runs, and a model of serving that weighs the hits."""
