"""Distributes work over ten concurrent sandboxes."""

import asyncio

from e2b import AsyncSandbox


async def count_primes(part: int) -> int:
    sandbox = await AsyncSandbox.create("base", timeout=300)
    try:
        code = (
            f"low = {part} * 100\n"
            "print(sum(all(n % d for d in range(2, n)) for n in range(max(low, 2), low + 100)))"
        )
        await sandbox.files.write("count.py", code)
        result = await sandbox.commands.run("python3 count.py")
        return int(result.stdout)
    finally:
        await sandbox.kill()


async def main() -> None:
    counts = await asyncio.gather(*(count_primes(part) for part in range(10)))
    print(counts)
    print("primes below 1000:", sum(counts))


asyncio.run(main())

# Prints:
# [25, 21, 16, 16, 17, 14, 16, 14, 15, 14]
# primes below 1000: 168
