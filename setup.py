"""Write the description that a package index shows: the README without relative links, which lead nowhere there."""

import re
from pathlib import Path

from setuptools import setup

readme = Path(__file__).with_name("README.md").read_text("utf-8")
readme = re.sub(r'<img src="(?!http)[^>]*>\n*', "", readme)
readme = re.sub(r"\[([^\]]+)\]\((?!http)[^)]*\)", r"\1", readme)

setup(long_description=readme, long_description_content_type="text/markdown")
