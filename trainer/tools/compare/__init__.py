"""`perdure compare`: runs and profiles a recipe under every strategy."""
