"""What the reading process and its helper process say to each other, and the socket between them."""
