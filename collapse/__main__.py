"""`python -m collapse`."""

from collapse.cli import main

main()
