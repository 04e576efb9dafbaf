"""H-PS: rounds for unequal workers, and their three parts one by one."""
