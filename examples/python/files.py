"""Writes and reads files from outside of the sandbox, and uses them inside."""

from e2b import Sandbox

with Sandbox.create("base", timeout=300) as sandbox:
    sandbox.files.write("data/numbers.txt", "3\n1\n2\n")
    sandbox.commands.run("sort data/numbers.txt > data/sorted.txt")
    print(sandbox.files.read("data/sorted.txt").split())

    image = bytes(range(256))
    sandbox.files.write("data/image.bin", image)
    print("unchanged:", bytes(sandbox.files.read("data/image.bin", format="bytes")) == image)

    for entry in sorted(sandbox.files.list("data"), key=lambda entry: entry.name):
        print(entry.name, entry.size)

    sandbox.files.rename("data/sorted.txt", "result.txt")
    sandbox.files.remove("data")
    print(sandbox.files.exists("data"), sandbox.files.exists("result.txt"))

# Prints:
# ['1', '2', '3']
# unchanged: True
# image.bin 256
# numbers.txt 6
# sorted.txt 6
# False True
