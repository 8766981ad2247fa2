"""Make the calls of a recording again, compare the answers, and shrink what differs."""
