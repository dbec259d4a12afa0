"""Where rows come from.

    plan (from `src` to parts) ─ places (folders, lists, databases, memory) ─ formats (one file each) ─ base

A format is a class made from (local path, name for errors, reading) with `schema()` and `batches(names)`, see
`base.base.TableFile`; `formats.by_extension` says which extension is which format.
"""
