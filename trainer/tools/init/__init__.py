"""`perdure init`: writes a planned and commented recipe for a model, data and a machine."""
