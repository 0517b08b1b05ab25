from fedslr.cli import main

main()
