"""A metric sink of one's own: a table in SQLite."""

import sqlite3


class Table:
    def __init__(self, path):
        self.database = sqlite3.connect(path)
        self.database.execute("CREATE TABLE IF NOT EXISTS metrics (step, name, value)")

    def record(self, step, values):
        rows = [(step, name, value) for name, value in values.items()]
        with self.database:  # a transaction
            self.database.executemany("INSERT INTO metrics VALUES (?, ?, ?)", rows)

    def rewind(self, step):
        """Optional: the run goes on before `step`, which will come again."""
        with self.database:
            self.database.execute("DELETE FROM metrics WHERE step >= ?", (step,))

    def close(self):
        self.database.close()


def sink(run_dir):
    """What `tracking.sinks` names: gets the run directory, a pathlib.Path."""
    return Table(run_dir / "metrics.sqlite")
