"""AdamW, its schedule and its exact form."""
