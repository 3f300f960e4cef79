"""`perdure import deepspeed`: a ds_config.json → a recipe."""
