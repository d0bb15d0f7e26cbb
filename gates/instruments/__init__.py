"""What gates measure with: tiny and real runs, paired timings, peaks, child processes."""
