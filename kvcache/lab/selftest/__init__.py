"""`kvcache selftest`: compare bytes to show whether kvcache works on this machine, and measure its speed."""
