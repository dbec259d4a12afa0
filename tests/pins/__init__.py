"""What the code of one commit did, written down, and what every later commit must still do.

`make.py` writes the files with the code of that commit, each file says which. Files of numbers are JSON; caches and indexes are
archives of what that code left on the disk. A pin that has to change is changed by hand, with the reason beside it.
"""
