"""Takes bf16 out of /proc/cpuinfo in every Python process that finds this folder in PYTHONPATH.

``make test-without-bf16`` puts it there, and tells torch and oneDNN to use AVX2 alone, so that a
CPU with bf16 instructions runs the tests as one without does: bf16 is simulated, in child processes
and ranks too. Python imports a module of this name before it runs anything.
"""

import pathlib

HIDDEN = {"avx512_bf16", "amx_bf16"}
read_text = pathlib.Path.read_text


def without_bf16(self: pathlib.Path, *args: str, **options: str) -> str:
    """What read_text gives, without the words that name bf16 instructions."""
    text = read_text(self, *args, **options)
    if str(self) != "/proc/cpuinfo":
        return text
    return "\n".join(
        " ".join(word for word in line.split(" ") if word not in HIDDEN)
        for line in text.split("\n")
    )


pathlib.Path.read_text = without_bf16
