"""Runs `nvidia-smi -q -x` and prints its output, each GPU as a map from paths to texts.

The parser is Python's own, so its input is checked to be well-formed.
"""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree


def flat(element, path, into):
    children = list(element)
    if not children:
        into.setdefault(path, []).append((element.text or "").strip())
    for child in children:
        flat(child, f"{path}/{child.tag}" if path else child.tag, into)
    return into


written = subprocess.run([sys.argv[1], "-q", "-x"], check=True, stdout=subprocess.PIPE).stdout
root = ElementTree.fromstring(written)
assert root.tag == "nvidia_smi_log", root.tag
json.dump(
    {
        "node": {child.tag: child.text for child in root if child.tag != "gpu"},
        "gpus": [{"id": gpu.get("id"), **flat(gpu, "", {})} for gpu in root.findall("gpu")],
    },
    sys.stdout,
)
