"""The index: the rows of a data source in one immutable SQLite file on local disk, found by id or by SQL.

    src ─ sources.plan ─ parts ─┬ sources.formats, sources.places ─ batches ─ file.writer ─ <fingerprint>.sqlite
                                └ remote files: downloaded, read, removed, one at a time
    sql_query ─ sql.dialect ─ sql.sandbox ─ build.select ─┬ rows as they are: <fingerprint>.positions.npy
                                                          └ computed columns: another <fingerprint>.sqlite
    file.index.Index: positions → row ids → rows

Promises:
- A file under its final name is whole: builders write under temporary names, under the kernel lock of the fingerprint.
- It is built once per directory and source version; a process that comes meanwhile waits for it.
- What goes in comes out, type and value, NaN and -0.0 included (a query's computed table reads NaN as None, as SQL does).
- Memory is flat: batches while building, 8 bytes a row for the check of keys, positions mapped.
- Users' SQL reads the rows and nothing else.

Words: source, file, row (id from 0), position (in the selection), selection (what a filter keeps), key (names a sample).
"""
