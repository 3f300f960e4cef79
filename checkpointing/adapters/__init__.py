"""The engine behind other libraries' ways to save. Each imports its library itself."""
