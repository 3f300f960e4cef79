"""Run the trainers of other libraries as elastic jobs. Each module imports its library."""
