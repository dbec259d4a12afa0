"""Places that tables come from: folders, wildcards, lists, databases, memory."""
