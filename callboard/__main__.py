"""`python -m callboard`."""

from callboard.supervision import main

main()
