"""`perdure ckpt`: what people do with checkpoints."""
