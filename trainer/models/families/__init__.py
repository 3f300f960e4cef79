"""The bundled model families. Each has a file named after its `model_type`, with its `Family` as
FAMILY."""
