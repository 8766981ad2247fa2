"""Run requests of a trace or of a generated workload through a manager, and report what it would have hit."""
