"""`python -m kvcache`: the same as the `kvcache` command."""

from kvcache.cli import main

main()
