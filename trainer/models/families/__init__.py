"""The bundled model families, each in a file named after its `model_type`, as FAMILY."""
