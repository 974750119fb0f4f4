"""A program that opens read transactions in a store's LMDB environment, and keeps them until standard input ends.

Arguments: the directory of the environment, and one of the following:
    a number: Open that many transactions, and print the number.
    "all": Open transactions until the reader table is full, and print their number.
    "again": Read all pages in one transaction after another. After the first transaction, print a checksum of the
    pages.
"""

from __future__ import annotations

import select
import sys

import lmdb


def main() -> None:
    path, what = sys.argv[1:]
    held: list[object] = []
    with lmdb.open(path, readonly=True, create=False, max_dbs=4, max_readers=1) as env:
        if what == "again":
            read_again_and_again(env)
            return
        try:
            while what == "all" or len(held) < int(what):
                txn = env.begin(buffers=True)
                pages = env.open_db(b"pages", txn=txn, create=False)
                held.append((txn, [value for _, value in zip(range(3), txn.cursor(pages), strict=False)]))
        except lmdb.ReadersFullError:
            pass
        say(len(held))
        sys.stdin.read()


def read_again_and_again(env: lmdb.Environment) -> None:
    turns = 0
    while not select.select([sys.stdin], [], [], 0.0)[0]:
        with env.begin(buffers=True) as txn:
            pages = env.open_db(b"pages", txn=txn, create=False)
            total = sum(sum(value[::512]) for value in txn.cursor(pages).iternext(keys=False))
        if not turns:
            say(total)
        turns += 1


def say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
