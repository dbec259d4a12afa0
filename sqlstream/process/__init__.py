"""What belongs to the operating system's process: locks on files and in memory, forks, signals, child processes."""
