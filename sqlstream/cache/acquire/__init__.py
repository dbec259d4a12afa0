"""Acquiring the objects of samples: pin what is here, reserve and download what is not, give all of it back.

    acquirer ┬ hits (all is here: by read locks, or one object by its row)
             ├ reserve (one transaction for a window) ─ room (who is evicted) ─ downloads (what this process leads)
             ├ wait (for downloads of others, and for room)
             └ holds ─ owner (this process in the ledger: its pins and its limit)

Order of effects: count, then write; unlink, then uncount. No process waits for room while it holds pins of samples that it has
not yielded.
"""
