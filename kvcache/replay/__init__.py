"""Run requests of a trace or of a generated workload through a manager, and tell what it would have brought."""
