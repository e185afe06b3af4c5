"""The Python host of the code interpreter; see `loop`."""
