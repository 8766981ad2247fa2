"""The commands of the laboratory, one file each; `kvcache.cli` mounts them."""
