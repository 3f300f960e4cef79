"""The bundled model families: one file each, named after its `model_type`, whose `Family` is
FAMILY."""
