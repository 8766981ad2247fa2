"""The commands of the laboratory, one file each; `mount` builds them for `kvcache.cli`."""
