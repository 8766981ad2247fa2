"""The laboratory: simulate traces, plan capacities, compare policies, and benchmark this machine.

Serving code never imports it.
"""
