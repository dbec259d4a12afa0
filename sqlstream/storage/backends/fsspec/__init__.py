"""fsspec: local files, every scheme that obstore does not serve, and `storage_options={'backend': 'fsspec'}`."""
