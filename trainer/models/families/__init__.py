"""The bundled model families: one file each, named after its `model_type`, with its `Family` as
FAMILY."""
