"""Where rows come from: one file a format, `plan` above them, which turns what users write as `src` into files to read.

A format is a class made from (local path, name for errors) with `schema()` and `batches(names)`, see `base.TableFile`.
"""
