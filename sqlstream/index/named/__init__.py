"""Members of archives that the rows of a table name: `zip://inner::outer`, `tar://inner::outer`, or an object with an offset.

Rows name archives by URL, thousands of them one archive. So the table of each archive is read once, when the index of the rows
is opened for the first time on a node, and a file beside that index says which bytes each value is. That file depends on the
selected rows and on the versions of the archives, which the index does not: it is made again when an archive has changed.
"""
