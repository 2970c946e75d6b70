"""Set-ups of pages are scripts with effects: the search for doctests must not import them."""

collect_ignore_glob = ["setups/*.py"]
