"""The agent of one machine, the processes that it runs, and how it supervises them."""
