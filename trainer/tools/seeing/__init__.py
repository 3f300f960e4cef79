"""Views of runs: an HTML page, static or live, a terminal view, a table of many runs. All of them
only read what runs write."""
