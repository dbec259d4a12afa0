"""Rows that share a sample, in packs of at most so many values: which rows meet, and in which order their packs come.

`pack_plan` says which lengths share a pack, `units` what has these lengths: rows, and parts of long ones; `packed` is the order
that draws them. `windows` is for rows whose lengths are not known before they are made.
"""
