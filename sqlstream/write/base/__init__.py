"""What all formats share: where files go, what is stored already, and the writer that cuts samples into shards."""
