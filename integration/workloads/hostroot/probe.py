# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tells, in JSON, where this Python and its PyTorch lie.

executable: what to start; directories: all that it loads files from;
versions: of PyTorch and torchvision, without which their import has failed.
"""

import json
import os
import sys

versions = {}
if "--torch" in sys.argv:
    import torch
    import torchvision

    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
directories = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(sys.executable), *sys.path[1:]]
json.dump(
    {
        "executable": sys.executable,
        "directories": sorted({path for path in directories if os.path.isdir(path)}),
        "versions": versions,
    },
    sys.stdout,
)
