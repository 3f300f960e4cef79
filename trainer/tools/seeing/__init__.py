"""Views of runs: an HTML page, static or live; a terminal view; a table of many runs. They only
read what runs write."""
