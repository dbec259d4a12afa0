"""The files of a cache directory and their locks; no SQL.

Only `disk.Disk`, with its `owner_files.OwnerFiles`, writes below data/, part/ and owners/.
A data file that is read under a shared lock is never unlinked.
"""
