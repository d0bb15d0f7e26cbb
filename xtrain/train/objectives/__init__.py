"""What a step minimises, one file each."""
