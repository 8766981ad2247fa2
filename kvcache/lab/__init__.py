"""The laboratory: simulate traces, plan capacities, compare policies, measure this machine.

Serving code never imports it.
"""
