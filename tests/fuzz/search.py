"""`python -m tests.fuzz.search PARSER [libFuzzer's arguments]`: searches until its time is over.

In a process of its own: libFuzzer ends the process, and counts the branches of all that is
imported below.
"""

import sys

import atheris

with atheris.instrument_imports(include=["router", "jwt"]):
    from tests.fuzz.corpus import check

if __name__ == "__main__":
    parser = sys.argv.pop(1)
    atheris.Setup(sys.argv, lambda data: check(parser, data))
    atheris.Fuzz()
