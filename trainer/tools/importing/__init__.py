"""`perdure import-…`: translates another trainer's configuration to a recipe.

DeepSpeed's JSON, accelerate's YAML and Hugging Face's TrainingArguments each have a module that
translates keys, and a table (`*_keys.py`) of the keys without a counterpart in recipes.
`ImportedConfig` ensures that each key is accounted for. In remarks *there* means the other trainer,
*here* Perdure.
"""
