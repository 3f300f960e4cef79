"""`perdure import-…`: translates another trainer's configuration to a recipe.

DeepSpeed's JSON, accelerate's YAML and Hugging Face's TrainingArguments share one mechanism: a
table of the keys without a counterpart in recipes (`*_keys.py`), a module that translates the other
keys, and `ForeignConfig`, which ensures that each key is accounted for. In remarks *there* means
the other trainer, *here* Perdure.
"""
