cat both
