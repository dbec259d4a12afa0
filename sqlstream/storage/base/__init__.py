"""What every part of storage needs: protocols, URLs, identity of objects, who may read what, retries. Pure but for settings."""
