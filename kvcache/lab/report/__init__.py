"""Show results: tables on the console, JSON and CSV files, plots."""
