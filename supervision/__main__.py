"""`python -m callboard.supervision`."""

from callboard.supervision import main

main()
