"""The strategies, one file each; `search/strategies.py` makes them by name."""
