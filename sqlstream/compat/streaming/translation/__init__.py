"""What MosaicML's names stand on: their parameters and what they become, places of shards, items of subclasses, indexes."""
