from foretrain.cli import main

main()
