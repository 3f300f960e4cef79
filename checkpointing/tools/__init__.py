"""The commands of `perdure ckpt`."""
