"""Runs, seen: one page as a file or live, a page in the terminal, a table of many. All of it only
reads what runs write."""
