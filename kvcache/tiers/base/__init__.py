"""The parts of every tier: the interface, jobs and their threads, catalogs, checksums and codecs."""
