"""The messages between the reading process and its helper process, and the socket that they go through."""
