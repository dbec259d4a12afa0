"""The names of MosaicML Streaming (`streaming`), over those of `sqlstream`."""
