"""Speed, measured against a peer and against the floor that the device sets: `xtrain-bench`."""
