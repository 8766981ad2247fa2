"""`kvcache selftest`: what works on this machine, shown by bytes, and how fast it is beside a bare copy."""
