"""What a tier is made of: the interface, jobs and their threads, catalogs, checksums and codecs."""
