"""`perdure import-…`: another trainer's configuration → a recipe.

DeepSpeed's JSON, accelerate's YAML and Hugging Face's TrainingArguments go through one mechanism: a
table of the keys that no recipe key stands for (`*_keys.py`), a module that translates the others,
and `Source`, which sees to it that each key is accounted for.
"""
