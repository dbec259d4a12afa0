"""What processes that died left behind, and an account that is made anew from the files."""
