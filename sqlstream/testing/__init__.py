"""The public test kit: servers that misbehave on cue, a watch on the disk, the promises of a cache as a check.

Beside the tower: it imports the floors below `stream`; of the package itself only the demo imports it.
"""
