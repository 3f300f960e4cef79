"""What a recipe trains: model and data, bundled or the user's own."""
