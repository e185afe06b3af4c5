"""The Python host of the code interpreter, beginning with `loop`."""
