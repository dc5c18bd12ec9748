"""Bash completion for `python -m recipes.NAME`: Hydra's own knows only `python file.py`."""

import os
import re
import sys

_BASH = """
_quintet() {
  COMPREPLY=()
  if [[ "$COMP_LINE" =~ ^[[:space:]]*[^[:space:]]*python[0-9.]*[[:space:]]+-m[[:space:]]+(recipes\\.[a-z_]+) ]]; then
    local module=${BASH_REMATCH[1]} choices
    choices=$(COMP_LINE="$COMP_LINE" "${COMP_WORDS[0]}" -m "$module" --shell-completion query=bash 2>/dev/null)
    COMPREPLY=($(compgen -W "$choices" -- "${COMP_WORDS[COMP_CWORD]}"))
  fi
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _quintet python python3
"""


def completes_in_bash() -> bool:
    """Print our script for `--shell-completion install=bash`; and make a query of it one that Hydra understands."""
    if "COMP_LINE" in os.environ:
        os.environ["COMP_LINE"] = re.sub(r"^\s*\S*python[\d.]*\s+-m\s+", "", os.environ["COMP_LINE"])
    if "install=bash" not in sys.argv:
        return False
    print(_BASH)
    return True
